// The list of runs.

import { get, getAll, ROOT } from "./api.js";
import { download } from "./csv.js";
import { byId, h, render } from "./dom.js";
import { ago, count, dateTime, percent, plural, real } from "./format.js";
import { bodies, grouped } from "./groups.js";
import { follow, throttle } from "./live.js";
import { prose, scale } from "./math.js";
import { notice, problemNotice, setUpTheme } from "./shell.js";
import { sparkline } from "./sparkline.js";
import { read, write } from "./state.js";
import { badge, sentence, status } from "./verdict.js";

const PAGE = 50;
const REFRESH_MS = 1000;
const TICK_MS = 15000;
const MOST_PICKED = 10; // as the server compares
const COLUMNS = ["Run", "State", "Verdict", "Skipped", "Scale now", "Loss", "Last seen"];
const FILTERS = ["q", "status", "order", "group"];

let wanted = PAGE; // how many runs the person has asked to see
let runs = [];
let more = false;
const picked = new Map(); // runs to compare: id → name

async function load() {
  const filters = read();
  try {
    const query = { q: filters.q, status: filters.status, order: filters.order };
    const page = wanted > PAGE ? await loadMany(query) : await get("runs", { ...query, limit: PAGE });
    runs = page.items;
    more = page.next !== null;
    show();
  } catch (problem) {
    showProblem(problem);
  }
  byId("runs").setAttribute("aria-busy", "false");
}

async function loadMany(query) {
  const items = await getAll("runs", { ...query, limit: PAGE }, wanted);
  return { items, next: items.length >= wanted ? "more" : null };
}

let drawn = 0;

function show(anew = false) {
  drawn += anew;
  byId("summary").textContent = runs.length ? summary() : "";
  render(byId("runs"), [runs, more, minute(), read().group, drawn], () => (runs.length ? [table(), more && moreButton()] : empty()));
}

const minute = () => Math.floor(Date.now() / TICK_MS); // what is relative to now grows old

function summary() {
  const failing = runs.filter((run) => run.verdict.word === "failing").length;
  const live = runs.filter((run) => run.status === "live").length;
  return [`${plural(runs.length, "run")}${more ? " shown" : ""}`, `${live} live`, `${failing} failing`].join(" · ");
}

function showProblem(problem) {
  if (runs.length) return; // what is on screen stays; the connection says that it is old
  byId("summary").textContent = "";
  render(byId("runs"), problem.message, () => problemNotice(problem, load));
}

function empty() {
  if (FILTERS.slice(0, 2).some((name) => read()[name])) {
    return notice("No run matches", "Take a filter away, or search for another name.", clearButton());
  }
  const code = 'import ampwatch\nscaler = ampwatch.GradScaler("cuda", model=model)';
  const detail = "Start a training with the two lines below, or run `ampwatch demo`. The run appears here by itself.";
  return notice("No runs yet", detail, h("pre", {}, h("code", {}, code)));
}

function clearButton() {
  const clear = () => {
    write({ q: null, status: null });
    fillFilters();
    load();
  };
  return h("button", { class: "button", type: "button", onclick: clear }, "Clear the filters");
}

function moreButton() {
  const grow = () => {
    wanted += PAGE;
    load();
  };
  return h("button", { class: "button more", type: "button", onclick: grow }, "Show more");
}

// The roles are written out: a table whose rows become blocks on a phone would lose them.
function table() {
  const head = ["", ...COLUMNS].map((name) => h("th", { scope: "col", role: "columnheader" }, name || h("span", { class: "visually-hidden" }, "Compare")));
  return h(
    "table",
    { class: "runs", role: "table" },
    h("caption", { class: "visually-hidden" }, "Runs"),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    bodies(grouped(runs, read().group), row, COLUMNS.length + 1, () => show(true)),
  );
}

function row(run) {
  const cells = [
    [nameCell(run), "name"],
    [status(run.status), "state"],
    [[badge(run.verdict.word), h("span", { class: "sentence" }, prose(sentence(run.verdict)))], "verdict-cell"],
    [percent(run.skipped, run.attempts), "number", `${count(run.skipped)} of ${plural(run.attempts, "attempt")}`],
    [scale(run.scale), "number", `${real(run.scale, 12)}`],
    [lossCell(run), "loss"],
    [ago(run.last_seen), "number", dateTime(run.last_seen)],
  ];
  return h("tr", { role: "row", "data-run": run.run }, pickCell(run), cells.map(([content, kind, title], i) => cell(content, kind, title, COLUMNS[i])));
}

const cell = (content, kind, title, label) => h("td", { role: "cell", class: kind, title, "data-label": label }, content);

function pickCell(run) {
  const name = run.name || run.run;
  const onchange = (event) => pick(run.run, name, event.target.checked);
  const box = h("input", { type: "checkbox", "aria-label": `Select ${name} to compare`, checked: picked.has(run.run), onchange });
  return h("td", { role: "cell", class: "pick" }, h("label", {}, box));
}

function pick(run, name, chosen) {
  if (chosen) picked.set(run, name);
  else picked.delete(run);
  showPicked();
}

function showPicked() {
  byId("picked").hidden = picked.size === 0;
  render(byId("picked"), [...picked], () => {
    const address = new URL("compare", ROOT);
    address.searchParams.set("runs", [...picked.keys()].join(","));
    const enough = picked.size > 1 && picked.size <= MOST_PICKED;
    const told = picked.size === 1 ? "Select another run to compare it with" : `Select at most ${MOST_PICKED} runs`;
    const link = h("a", { class: "button primary", href: address }, `Compare ${plural(picked.size, "run")}`);
    return [h("span", { class: "picked-names" }, [...picked.values()].join(", ")), enough ? link : h("span", { class: "muted" }, told), h("button", { class: "button quiet", type: "button", onclick: unpick }, "Clear")];
  });
}

function unpick() {
  picked.clear();
  for (const box of document.querySelectorAll(".pick input")) box.checked = false;
  showPicked();
}

function nameCell(run) {
  const link = h("a", { href: new URL(`run/${encodeURIComponent(run.run)}`, ROOT), class: "row-link" }, run.name || run.run);
  const about = [run.project, run.world_size > 1 ? `${run.world_size} ranks` : null, plural(run.attempts, "attempt")];
  const tags = run.tags.map((tag) => h("span", { class: "tag" }, tag));
  return [link, h("span", { class: "muted small" }, about.filter(Boolean).join(" · ")), tags];
}

function lossCell(run) {
  const label = `Loss over the run, now ${real(run.loss)}`;
  return [sparkline(run.sparkline.loss, label), h("span", { class: "muted small" }, real(run.loss))];
}

async function saveCsv() {
  const { q, status, order } = read();
  const all = await getAll("runs", { q, status, order });
  const header = ["run", "name", "project", "status", "verdict", "sentence", "attempts", "taken", "skipped", "step", "scale", "loss", "started_s", "last_seen_s"];
  const rows = all.map((run) => [run.run, run.name, run.project, run.status, run.verdict.word, run.verdict.sentence, run.attempts, run.taken, run.skipped, run.step, run.scale, run.loss, run.started, run.last_seen]);
  download("ampwatch-runs.csv", header, rows);
}

function fillFilters() {
  const state = read();
  for (const name of FILTERS) byId(name).value = state[name] ?? (name === "order" ? "-last_seen" : "");
}

function setUpFilters() {
  const search = throttle(load, 200);
  fillFilters();
  byId("filters").addEventListener("input", () => {
    write(Object.fromEntries(FILTERS.map((name) => [name, byId(name).value])));
    wanted = PAGE;
    search();
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("csv").addEventListener("click", () => saveCsv().catch(showProblem));
}

setUpTheme();
setUpFilters();
await load();
const refresh = throttle(load, REFRESH_MS);
follow({ onrun: refresh, onresume: refresh });
setInterval(() => document.hidden || !runs.length || show(), TICK_MS);
