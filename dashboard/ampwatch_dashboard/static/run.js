// The page of one run: loads it, follows it, and keeps the view in the address.

import { get, ROOT, runPath, send, url } from "./api.js";
import { byId, h, render } from "./dom.js";
import { loadEvents, setUpEvents } from "./events.js";
import { showFindings } from "./findings.js";
import { follow, throttle } from "./live.js";
import { place, setProcesses } from "./places.js";
import { plotly } from "./plot.js";
import { saveRanks, showRankTable } from "./ranks.js";
import { notice, problemNotice, setUpTheme, theme } from "./shell.js";
import { read, write } from "./state.js";
import { showSummary } from "./summary.js";
import { drawHeatmap, drawHistogram, loadTensors, saveTensors, showRowsButton } from "./tensors.js";
import { drawTimeline } from "./timeline.js";

const REFRESH_MS = 500;
const ZOOM_MS = 150;
const BESIDE_MOMENT = 40; // attempts shown on either side of a single moment
const DEFAULT_STATS = { fatal: "nonfinite", error: "nonfinite" }; // by the severity of the verdict
const MANY_RANKS = 8;
const STATS = [...byId("stat").options].map((option) => option.value);

const run = decodeURIComponent(location.pathname.split("/").at(-1));
let shown = null;
let findings = [];
let verdict = null;
let tensors = [];
let unknown = false; // the server has no such run: nothing to follow
let attempts = 0; // of the rank that has made most, over its processes
let ranks = [];

function view() {
  const state = read();
  const at = state.at ? Number(state.at) : null;
  const range = state.from && state.to ? [Number(state.from), Number(state.to)] : momentRange(state.finding, at);
  const stat = STATS.includes(state.stat) ? state.stat : (DEFAULT_STATS[verdict?.severity] ?? STATS[0]);
  return { range, at, stat, all: state.rows === "all", finding: state.finding ?? null, tensor: state.tensor ?? "", rank: chosenRank(state.rank) };
}

/** The rank to draw, "" for all. A line for each of many ranks says little: without a choice it is the lowest then. */
function chosenRank(asked) {
  if (asked === "all") return "";
  if (ranks.includes(Number(asked))) return asked;
  return ranks.length > MANY_RANKS ? String(ranks[0]) : "";
}

/** The part of the run around a moment or a finding; null where the address names none, or one that is gone. */
function momentRange(key, at) {
  const finding = findings.find((one) => one.key === key);
  if (at !== null) return within(at - BESIDE_MOMENT, at + BESIDE_MOMENT);
  if (!finding || finding.first_attempt < 0) return null;
  const [first, last] = [finding.first_attempt, finding.last_attempt].map((attempt) => place(attempt, finding.producer));
  const beside = Math.max(BESIDE_MOMENT, 0.5 * (last - first));
  return within(first - beside, last + beside);
}

/** Whether the page shows what the stream tells of the run; its first news are what was there when the page was opened. */
function isShown({ attempts, status, verdict }) {
  return attempts === shown?.attempts && status === shown.status && verdict.sentence === shown.verdict.sentence;
}

const within = (from, to) => [Math.max(-0.5, from), Math.min(to, Math.max(attempts, from + 1))];

async function load() {
  try {
    const [about, found] = await Promise.all([get(runPath(run)), get(runPath(run, "/findings"))]);
    ({ findings, verdict } = found);
    shown = about;
    byId("page").hidden = false;
    byId("problem").replaceChildren();
    attempts = Math.max(0, ...about.producers.map((producer) => producer.begins + producer.attempts));
    setProcesses(about.producers);
    ranks = [...new Set(about.producers.map((producer) => producer.rank))].sort((a, b) => a - b);
    showRanks();
    showSummary(about);
    showRankTable(about.producers, (rank) => go({ rank }));
    showFindings(findings, verdict, view().finding, { go, mark });
    tensors = await loadTensors(run);
    await Promise.all([draw(), loadEvents(run, go)]);
  } catch (problem) {
    showProblem(problem);
  }
}

function showProblem(problem) {
  unknown ||= problem.status === 404;
  byId("page").toggleAttribute("data-stale", true);
  render(byId("problem"), problem.message, () => (unknown ? noSuchRun() : problemNotice(problem, load)));
}

const noSuchRun = () =>
  notice("There is no such run here", `${run} was deleted, or was recorded on another server.`, h("a", { class: "button", href: ROOT }, "All runs"));

async function draw() {
  const now = view();
  showRanks();
  showRowsButton(tensors, now.all);
  const plots = [
    drawTimeline(run, now, zoomed),
    drawHeatmap(run, now, { choose: (tensor) => change({ tensor }), moved: zoomed }),
    drawHistogram(run, now, tensors),
  ];
  await Promise.all(plots);
  byId("page").removeAttribute("data-stale");
}

const redraw = throttle(() => draw().catch(showProblem), ZOOM_MS);

function change(patch) {
  write(patch, true);
  showFindings(findings, verdict, view().finding, { go, mark });
  redraw();
}

/** Keep what a person said of a finding. */
async function mark(key, value) {
  try {
    await send("PATCH", runPath(run, `/findings/${encodeURIComponent(key)}`), { mark: value });
    await load();
    byId("findings-list").querySelector(`[data-key="${CSS.escape(key)}"] summary`)?.focus();
  } catch (problem) {
    showProblem(problem);
  }
}

function showRanks() {
  byId("rank-field").hidden = ranks.length < 2;
  render(byId("rank"), ranks, () => [h("option", { value: "all" }, "All"), ...ranks.map((rank) => h("option", { value: rank }, rank))]);
  byId("rank").value = view().rank || "all";
}

/** Move the view to a finding or a moment. */
function go(patch) {
  change({ ...patch, from: null, to: null });
  byId("timeline").scrollIntoView({ block: "nearest" });
  byId("timeline").focus({ preventScroll: true });
}

function zoomed(range) {
  const [from, to] = range?.map(Math.round) ?? [null, null];
  const whole = range === null ? { finding: null, at: null } : {};
  write({ from, to, ...whole });
  redraw();
}

function setUp() {
  setUpTheme(redraw);
  setUpEvents(run, go);
  byId("stat").addEventListener("change", (event) => change({ stat: event.target.value }));
  byId("tensor").addEventListener("change", (event) => change({ tensor: event.target.value }));
  byId("whole").addEventListener("click", () => change({ from: null, to: null, finding: null, at: null }));
  byId("rank").addEventListener("change", (event) => change({ rank: event.target.value }));
  for (const link of document.querySelectorAll("[data-export]")) link.href = exportUrl(link.dataset);
  byId("all-rows").addEventListener("click", () => change({ rows: view().all ? null : "all" }));
  byId("what-if").href = new URL(`what-if/${encodeURIComponent(run)}`, ROOT);
  byId("ranks-csv").addEventListener("click", () => saveRanks(run));
  byId("tensors-csv").addEventListener("click", () => saveTensors(run, tensors));
  addEventListener("popstate", () => change({}));
}

const exportUrl = ({ export: what, kind, format }) => url(runPath(run, `/${what}`), { kind, format, theme: what === "report" ? theme() : null });

setUp();
plotly().catch(() => {}); // draw() tells of it
await load();
if (!unknown) {
  const refresh = throttle(load, REFRESH_MS);
  let first = true;
  const onrun = (state) => {
    if (!first || !isShown(state)) refresh();
    first = false;
  };
  follow({ run, onrun, onresume: refresh });
}
