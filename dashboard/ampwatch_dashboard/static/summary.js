// The head of a run: its name and state, the verdict, the numbers of now, and what it is made of.

import { byId, h, render } from "./dom.js";
import { ago, count, dateTime, percent, plural, real, text } from "./format.js";
import { icon } from "./icons.js";
import { isPower, prose, scale } from "./math.js";
import { sentence, status, WORDS } from "./verdict.js";

export function showSummary(run) {
  const name = run.name || run.run;
  document.title = `${WORDS[run.verdict.word]}: ${name} · ampwatch`;
  byId("name").textContent = name;
  byId("meta").replaceChildren(...meta(run));
  const verdict = byId("verdict");
  verdict.dataset.word = run.verdict.word;
  render(verdict, run.verdict, () => verdictText(run.verdict));
  byId("facts").replaceChildren(...facts(run));
  render(byId("about"), [run.producers, run.optimizers, run.scalers, run.versions, run.config], () => about(run));
}

function meta(run) {
  const seen = h("span", { title: dateTime(run.last_seen) }, `last record ${ago(run.last_seen)}`);
  const named = run.name && run.name !== run.run && h("code", {}, run.run);
  return [status(run.status), run.project && h("span", {}, run.project), seen, named, ...run.tags.map((tag) => h("span", { class: "tag" }, tag))].filter(Boolean);
}

function verdictText(verdict) {
  return [
    h("span", { class: "verdict-icon" }, icon(verdict.word, 28)),
    h("div", {}, h("p", { class: "verdict-word" }, WORDS[verdict.word]), h("p", { class: "verdict-sentence" }, prose(sentence(verdict)))),
  ];
}

function facts(run) {
  return [
    fact("Attempts", count(run.attempts)),
    fact("Steps skipped", percent(run.skipped, run.attempts), `${count(run.skipped)} of ${count(run.attempts)}`),
    fact("Loss scale now", scale(run.scale), isPower(run.scale) && real(run.scale, 12)),
    fact("Loss now", real(run.loss)),
    fact("Step now", count(run.step)),
    fact("Ranks", count(run.world_size)),
  ];
}

const fact = (name, value, more) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)));

function about(run) {
  const started = h("p", { class: "muted" }, `Started ${dateTime(run.started)}, last record ${dateTime(run.last_seen)}.`);
  return [
    started,
    named("Processes", producers(run.producers)),
    run.optimizers.length > 0 && named("Optimizers", optimizers(run.optimizers)),
    scaled(run).length > 0 && named("Scalers", scalers(scaled(run))),
    named("Versions", pairs(run.versions)),
    Object.keys(run.config).length > 0 && named("Configuration", pairs(run.config)),
  ].filter(Boolean);
}

const named = (title, content) => h("section", {}, h("h3", {}, title), content);

function small(head, rows) {
  const cells = (row) => row.map((value) => h("td", {}, value));
  return h(
    "div",
    { class: "scroll" },
    h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))),
  );
}

function producers(list) {
  const head = ["Rank", "Process", "Host", "Device", "Attempts", "Records"];
  return small(head, list.map((p) => [count(p.rank), h("code", {}, p.producer.slice(0, 8)), p.host, p.device, count(p.attempts), records(p)]));
}

function records(producer) {
  if (producer.missing.length) return `${plural(producer.missing.length, "batch is", "batches are")} missing`;
  return producer.finished ? "complete" : "complete so far";
}

function optimizers(list) {
  const head = ["#", "Class", "Fused", "Learning rate", "eps", "Tensors", "Elements"];
  const rates = (o) => [o.lr].flat().map((lr) => real(lr)).join(", ");
  return small(head, list.map((o) => [count(o.id), text(o.class), o.fused ? "yes" : "no", rates(o), real(o.eps), count(o.tensors), count(o.numel)]));
}

// A watched optimizer without a scaler has one by the name of "none".
const scaled = (run) => run.scalers.filter((x) => x.policy !== "none");

function scalers(list) {
  const head = ["#", "Class", "Enabled", "First scale", "Growth", "Backoff", "Interval"];
  return small(head, list.map((x) => [count(x.scaler), text(x.class), x.enabled ? "yes" : "no", scale(x.init_scale), `× ${real(x.growth_factor)}`, `× ${real(x.backoff_factor)}`, `${count(x.growth_interval)} attempts`]));
}

const pairs = (object) => h("dl", { class: "pairs" }, Object.entries(object).map(([key, value]) => [h("dt", {}, key), h("dd", {}, text(value))]));
