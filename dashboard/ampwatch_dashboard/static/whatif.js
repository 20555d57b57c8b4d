// What if: another setting of the loss scaler, replayed over a run by the server as one moves it.

import { get, ROOT, runPath, send } from "./api.js";
import { codeBlock } from "./code.js";
import { byId, h, render } from "./dom.js";
import { count, MISSING, percent } from "./format.js";
import { throttle } from "./live.js";
import { prose, scale } from "./math.js";
import { control } from "./parameters.js";
import { draw, plotly } from "./plot.js";
import { problemNotice, setUpTheme, theme } from "./shell.js";
import { read, write } from "./state.js";

const MOVE_MS = 120;
const SETTING = "set."; // what of the address is a parameter

const run = decodeURIComponent(location.pathname.split("/").at(-1));
let policies = {};
let recorded = {}; // the parameters of the recorded scaler, as torch's
let setting = { policy: "torch", parameters: {} };

async function load() {
  try {
    const [known, found, about] = await Promise.all([get("policies"), get(runPath(run, "/recommendations")), get(runPath(run))]);
    ({ policies } = known);
    recorded = ownParameters(found.scaler);
    showRun(about);
    showRecommended(found.recommendations);
    setting = asAddressed();
    showSetting();
    byId("page").hidden = false;
    byId("problem").replaceChildren();
    await replay();
  } catch (problem) {
    byId("problem").replaceChildren(problemNotice(problem, load));
  }
}

/** Of the recorded scaler's description what torch's has a parameter for. */
function ownParameters(scaler) {
  const names = Object.keys(policies.torch);
  return Object.fromEntries(names.filter((name) => typeof scaler[name] === "number").map((name) => [name, scaler[name]]));
}

function showRun(about) {
  const page = new URL(`run/${encodeURIComponent(run)}`, ROOT);
  byId("back").href = page;
  byId("meta").replaceChildren(h("a", { href: page }, about.name || run), h("span", {}, `${count(about.attempts)} attempts`));
  document.title = `What if · ${about.name || run} · ampwatch`;
}

function showRecommended(recommendations) {
  byId("recommended").replaceChildren(...recommendations.map(recommendation));
}

function recommendation({ kind, text, parameters, code, worst, best }) {
  const bounds = worst == null ? null : h("span", { class: "muted small" }, `${range(best, worst)} skipped`);
  const choose = () => change({ policy: "torch", parameters });
  return h(
    "div",
    { class: "recommendation", "data-kind": kind },
    h("p", {}, prose(text)),
    bounds,
    code && h("button", { class: "button", type: "button", onclick: choose }, "Show this setting"),
  );
}

const range = (low, high) => (low === high ? count(low) : `${count(low)} to ${count(high)}`);

/** The setting that the address names; the recorded one where it names none. */
function asAddressed() {
  const state = read();
  const policy = state.policy in policies ? state.policy : "torch";
  const given = Object.entries(state).filter(([name]) => name.startsWith(SETTING));
  if (!given.length) return { policy, parameters: policy === "torch" ? { ...recorded } : {} };
  const parameters = given.map(([name, value]) => [name.slice(SETTING.length), JSON.parse(value)]);
  return { policy, parameters: Object.fromEntries(parameters.filter(([name]) => name in policies[policy])) };
}

function showSetting() {
  const { policy, parameters } = setting;
  byId("policy").replaceChildren(...Object.keys(policies).map((name) => h("option", { selected: name === policy }, name)));
  const all = { ...policies[policy], ...parameters };
  byId("parameters").replaceChildren(...Object.entries(all).map(([name, value]) => control(name, value, moved)));
}

function moved(name, value) {
  setting.parameters = { ...setting.parameters, [name]: value };
  remember(false);
  replaySoon();
}

function change(next) {
  setting = next;
  showSetting();
  remember(true);
  replaySoon();
}

/** Write the setting to the address. */
function remember(push) {
  const gone = Object.fromEntries(Object.keys(read()).filter((name) => name.startsWith(SETTING)).map((name) => [name, null]));
  const kept = Object.entries(setting.parameters).map(([name, value]) => [SETTING + name, JSON.stringify(value)]);
  write({ ...gone, policy: setting.policy, ...Object.fromEntries(kept) }, push);
}

let asked = 0;

async function replay() {
  const mine = ++asked;
  const outcome = await send("POST", runPath(run, "/replay"), setting, { theme: theme() });
  if (mine !== asked) return; // it has moved on
  showEffects(outcome);
  byId("code").replaceChildren(codeBlock(outcome.code, "Python"));
  byId("problem").replaceChildren();
  await draw(byId("replay-plot"), outcome.figure, null, `ampwatch-${run}-what-if`);
}

const replaySoon = throttle(() => replay().catch((problem) => byId("problem").replaceChildren(problemNotice(problem, replaySoon))), MOVE_MS);

function showEffects(outcome) {
  const { best, likely, worst } = outcome.replayed;
  render(byId("effects"), outcome, () => [
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["", "Steps lost", "Time lost", "Underflow", "Scale at the end"].map((name) => h("th", { scope: "col" }, name)))),
      h(
        "tbody",
        {},
        row("As recorded", outcome.recorded, outcome),
        row("This setting, likely", likely, outcome, outcome.recorded),
        h("tr", { class: "bound" }, h("td", {}, "at best, at worst"), bounds(best, worst, outcome)),
      ),
    ),
    ...[likely.stopped && notes(likely), outcome.hopeless > 0 && hopeless(outcome.hopeless)],
  ]);
}

function row(name, effect, outcome, before = null) {
  const mark = (value, old) => (before === null || value === old || value == null || old == null ? null : value < old ? "better" : "worse");
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, name),
    h("td", { class: mark(effect.skipped, before?.skipped) }, `${count(effect.skipped)} (${percent(effect.skipped, outcome.attempts)})`),
    h("td", {}, duration(effect.skipped, outcome.attempt_s)),
    h("td", { class: mark(effect.underflow_share, before?.underflow_share) }, share(effect.underflow_share)),
    h("td", {}, scale(effect.final_scale)),
  );
}

const bounds = (best, worst, outcome) => [
  h("td", {}, range(best.skipped, worst.skipped)),
  h("td", {}, best.skipped === worst.skipped ? "" : `${duration(best.skipped, outcome.attempt_s)} to ${duration(worst.skipped, outcome.attempt_s)}`),
  h("td", {}, best.underflow_share === worst.underflow_share ? "" : `${share(best.underflow_share)} to ${share(worst.underflow_share)}`),
  h("td", {}, best.final_scale === worst.final_scale ? "" : [scale(worst.final_scale), " to ", scale(best.final_scale)]),
];

const share = (value) => (value == null ? MISSING : percent(value, 1));

function duration(attempts, attempt_s) {
  if (attempt_s == null) return MISSING;
  const seconds = attempts * attempt_s;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const notes = ({ stopped, stopped_at }) => h("p", { class: "help" }, `${stopped}, at attempt ${count(stopped_at)}: training ends there.`);

const hopeless = (n) => h("p", { class: "help" }, `${count(n)} of the recorded skips had a loss that is not finite: no scale would have taken them.`);

function setUp() {
  setUpTheme(() => replaySoon());
  byId("policy").addEventListener("change", (event) => change({ policy: event.target.value, parameters: event.target.value === "torch" ? { ...recorded } : {} }));
  byId("reset").addEventListener("click", () => change({ policy: "torch", parameters: { ...recorded } }));
  byId("setting").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("popstate", () => {
    setting = asAddressed();
    showSetting();
    replaySoon();
  });
}

setUp();
plotly().catch(() => {}); // draw() tells of it
await load();
