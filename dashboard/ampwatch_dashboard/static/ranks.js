// Ranks: how far each has come, and in what one differs from the others.

import { download } from "./csv.js";
import { byId, h, render } from "./dom.js";
import { ago, count, dateTime, percent, plural } from "./format.js";

const MOST = 32; // rows; of more ranks only those that stand out, until all are asked for
const COLUMNS = ["Rank", "Host", "Device", "Attempts", "Behind", "Skipped", "Last record", "Records"];

let all = false;
let ranks = [];

/** The ranks of a run with several: the processes of each counted together, the last of them named. */
export function ranksOf(producers) {
  const found = new Map();
  for (const process of producers) found.set(process.rank, [...(found.get(process.rank) ?? []), process]);
  const made = [...found].map(([rank, processes]) => summed(rank, processes));
  const furthest = Math.max(...made.map((one) => one.attempts));
  const usual = mode(made.map((one) => one.skipped));
  return made.map((one) => ({ ...one, behind: furthest - one.attempts, unlike: made.length > 2 && one.skipped !== usual })).sort((a, b) => a.rank - b.rank);
}

function summed(rank, processes) {
  const last = processes.at(-1);
  const sum = (name) => processes.reduce((total, process) => total + process[name], 0);
  const missing = processes.reduce((total, process) => total + process.missing.length, 0);
  return { rank, host: last.host, device: last.device, attempts: last.begins + last.attempts, skipped: sum("skipped"), last_seen: last.last_seen, missing, finished: last.finished, processes: processes.length };
}

/** The value that most have. */
function mode(values) {
  const counted = new Map();
  for (const value of values) counted.set(value, (counted.get(value) ?? 0) + 1);
  return [...counted].reduce((best, one) => (one[1] > best[1] ? one : best))[0];
}

const standsOut = (one) => one.behind > 0 || one.unlike || one.missing > 0;

export function showRankTable(producers, choose) {
  ranks = ranksOf(producers);
  byId("ranks").hidden = ranks.length < 2;
  if (ranks.length < 2) return;
  const odd = ranks.filter(standsOut);
  const shown = all || ranks.length <= MOST ? ranks : odd;
  byId("ranks-told").textContent = odd.length ? `${count(odd.length)} of ${plural(ranks.length, "rank")} stand out` : `${plural(ranks.length, "rank")}, alike`;
  const button = byId("odd-ranks");
  button.hidden = ranks.length <= MOST;
  button.textContent = all ? "Only those that stand out" : `Show all ${count(ranks.length)}`;
  button.setAttribute("aria-pressed", String(all));
  button.onclick = () => {
    all = !all;
    showRankTable(producers, choose);
  };
  render(byId("ranks-table"), [shown, Math.floor(Date.now() / 15000)], () => shown.length > 0 && table(shown, choose));
}

function table(shown, choose) {
  const head = h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ranks" }, h("table", { class: "ranks" }, h("thead", {}, head), h("tbody", {}, shown.map((one) => row(one, choose)))));
}

function row(one, choose) {
  const show = h("button", { class: "moment", type: "button", "aria-label": `Show rank ${one.rank} in the plots`, onclick: () => choose(String(one.rank)) }, count(one.rank));
  return h(
    "tr",
    { "data-rank": one.rank },
    h("th", { scope: "row" }, show),
    h("td", {}, one.host),
    h("td", {}, one.device),
    h("td", { class: "number" }, count(one.attempts)),
    h("td", { class: one.behind ? "number odd" : "number" }, one.behind ? count(one.behind) : "0"),
    h("td", { class: one.unlike ? "number odd" : "number", title: one.unlike ? "most ranks skipped another number" : null }, `${count(one.skipped)} (${percent(one.skipped, one.attempts)})`),
    h("td", { title: dateTime(one.last_seen) }, ago(one.last_seen)),
    h("td", { class: one.missing ? "odd" : null }, records(one)),
  );
}

function records(one) {
  const processes = one.processes > 1 ? `${count(one.processes)} processes, ` : "";
  if (one.missing) return `${processes}${plural(one.missing, "batch is", "batches are")} missing`;
  return `${processes}${one.finished ? "complete" : "complete so far"}`;
}

export function saveRanks(run) {
  const header = ["rank", "host", "device", "attempts", "behind", "skipped", "last_seen_s", "missing_batches", "finished", "processes"];
  const rows = ranks.map((one) => [one.rank, one.host, one.device, one.attempts, one.behind, one.skipped, one.last_seen, one.missing, one.finished, one.processes]);
  download(`ampwatch-${run}-ranks.csv`, header, rows);
}
