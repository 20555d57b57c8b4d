// Several runs beside each other: what they came to, their curves, in what they differ.

import { get, ROOT, runPath } from "./api.js";
import { download } from "./csv.js";
import { byId, h, render, s } from "./dom.js";
import { ago, count, dateTime, percent, plural, real, text } from "./format.js";
import { follow, throttle } from "./live.js";
import { prose, scale } from "./math.js";
import { draw, onRange, plotly } from "./plot.js";
import { notice, problemNotice, setUpTheme, theme } from "./shell.js";
import { address, read, write } from "./state.js";
import { rangeQuery } from "./range.js";
import { badge, sentence, status } from "./verdict.js";

const REFRESH_MS = 5000;
const ZOOM_MS = 150;
const plot = byId("plot");

let found = { runs: [], differences: [] };
let wired = false;

const chosen = () => (read().runs ?? "").split(",").filter(Boolean);

const range = () => {
  const { from, to } = read();
  return from && to ? [Number(from), Number(to)] : null;
};

async function load() {
  if (!chosen().length) return showEmpty();
  try {
    found = await get("compare", { runs: chosen().join(","), points: 1 });
    byId("page").hidden = false;
    byId("problem").replaceChildren();
    await show();
  } catch (problem) {
    const gone = problem.status === 404 ? await missing() : [];
    render(byId("problem"), [problem.message, gone], () => (gone.length ? unknown(gone) : problemNotice(problem, load)));
  }
}

/** Those of the chosen runs that the server does not have. */
async function missing() {
  const asked = await Promise.allSettled(chosen().map((run) => get(runPath(run))));
  return chosen().filter((_, i) => asked[i].reason?.status === 404);
}

const back = () => h("a", { class: "button", href: ROOT }, "All runs");

function unknown(gone) {
  const rest = chosen().filter((run) => !gone.includes(run));
  const others = h("a", { class: "button", href: address({ runs: rest.join(",") }) }, "Compare the others");
  const title = gone.length === 1 ? "A run is not here" : "Runs are not here";
  const detail = `Not on this server: ${gone.join(", ")}. Deleted, or never sent, or the name is another.`;
  return notice(title, detail, rest.length ? others : back());
}

function showEmpty() {
  render(byId("problem"), "none", () => notice("No run is chosen", "Tick two or more in the list of runs, then compare them.", back()));
}

async function show() {
  const names = found.runs.map(nameOf);
  document.title = `${names.join(", ")} · ampwatch`;
  byId("title").textContent = `Compare ${plural(names.length, "run")}`;
  const figure = await get("compare/figure", { runs: chosen().join(","), theme: theme(), points: points(), ...rangeQuery(range()) });
  const colors = found.runs.map((_, i) => figure.data.find((trace) => trace.legendgroup === String(i))?.line.color);
  render(byId("outcome"), [found.runs, colors], () => outcome(colors));
  byId("differences-count").textContent = found.differences.length ? count(found.differences.length) : "";
  render(byId("differences"), [found.differences, colors], () => differences(colors));
  await draw(plot, figure, range(), "ampwatch-compare");
  if (!wired) onRange(plot, zoomed);
  wired = true;
  const shown = range();
  byId("range").textContent = shown ? `attempts ${count(Math.max(0, shown[0]))} to ${count(shown[1])}` : "";
  byId("whole").hidden = shown === null;
}

const points = () => Math.min(1200, Math.max(200, plot.clientWidth));

const nameOf = (run) => run.name || run.run;

const FACTS = [
  ["Verdict", (run) => [badge(run.verdict.word), h("p", { class: "small muted" }, prose(sentence(run.verdict)))]],
  ["State", (run) => status(run.status)],
  ["Attempts", (run) => count(run.attempts)],
  ["Steps skipped", (run) => [percent(run.skipped, run.attempts), h("span", { class: "muted small" }, ` ${count(run.skipped)}`)]],
  ["Loss now", (run) => real(run.loss)],
  ["Loss scale now", (run) => scale(run.scale)],
  ["Ranks", (run) => count(run.world_size)],
  ["Started", (run) => h("span", { title: dateTime(run.started) }, ago(run.started))],
];

function outcome(colors) {
  return table("Runs", headOf(colors, true), FACTS.map(([name, of]) => [name, ...found.runs.map(of)]));
}

function differences(colors) {
  if (found.runs.length < 2) return notice("One run differs from none", "Tick more in the list of runs.");
  if (!found.differences.length) return notice("Nothing that was recorded of them differs", "Configuration, scalers, optimizers, versions and number of ranks are the same.");
  return table("Differences", headOf(colors, false), found.differences.map((row) => [h("code", {}, row.name), ...row.values.map(text)]));
}

function headOf(colors, withLinks) {
  return found.runs.map((run, i) => {
    const swatch = s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("rect", { width: 12, height: 12, rx: 3, fill: colors[i] ?? "none" }));
    const name = withLinks ? h("a", { href: new URL(`run/${encodeURIComponent(run.run)}`, ROOT) }, nameOf(run)) : nameOf(run);
    return [swatch, name, withLinks && found.runs.length > 1 && without(run)];
  });
}

/** A link to the same page without a run. */
function without(run) {
  const rest = chosen().filter((one) => one !== run.run).join(",");
  return h("a", { class: "without", href: address({ runs: rest }), "aria-label": `Leave ${nameOf(run)} out`, title: "Leave out" }, "×");
}

function table(label, heads, rows) {
  const cells = ([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, value)));
  const head = h("tr", {}, h("td", {}), heads.map((content) => h("th", { scope: "col" }, h("span", { class: "head" }, content))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: "beside" }, h("thead", {}, head), h("tbody", {}, rows.map(cells))));
}

function saveCsv() {
  const rows = found.differences.map((row) => [row.name, ...row.values.map(text)]);
  download("ampwatch-compare.csv", ["name", ...found.runs.map((run) => run.run)], rows);
}

const redraw = throttle(() => show().catch((problem) => render(byId("problem"), problem.message, () => problemNotice(problem, load))), ZOOM_MS);

function zoomed(shown) {
  const [from, to] = shown?.map(Math.round) ?? [null, null];
  write({ from, to });
  redraw();
}

setUpTheme(redraw);
byId("whole").addEventListener("click", () => zoomed(null));
byId("csv").addEventListener("click", saveCsv);
plotly().catch(() => {}); // draw() tells of it
await load();
const refresh = throttle(load, REFRESH_MS);
follow({ onrun: (state) => chosen().includes(state.run) && refresh(), onresume: refresh });
