// Findings: what, the evidence with a link to each moment, and what to do, with code to copy.

import { codeBlock } from "./code.js";
import { byId, h, render } from "./dom.js";
import { count, moment } from "./format.js";
import { icon } from "./icons.js";
import { prose } from "./math.js";
import { place } from "./places.js";
import { address } from "./state.js";
import { notice } from "./shell.js";

const SEVERITY = { fatal: "Fatal", error: "Error", warning: "Warning", info: "Info" };
const STATE = { open: "still going on", recovered: "recovered", explained: "explained", acknowledged: "acknowledged" };

/** Show the list; `go(patch)` moves the view to a moment. */
export function showFindings(findings, verdict, chosen, go) {
  const list = byId("findings-list");
  const open = new Map([...list.querySelectorAll("details[data-key]")].map((element) => [element.dataset.key, element.open]));
  byId("findings-count").textContent = findings.length ? count(findings.length) : "";
  render(list, [findings, verdict], () =>
    findings.length ? findings.map((finding) => card(finding, verdict, open.get(finding.key) ?? finding.severity !== "info", go)) : none(verdict),
  );
  for (const element of list.querySelectorAll("[data-key]")) {
    element.toggleAttribute("data-chosen", element.dataset.key === chosen);
  }
}

const none = (verdict) =>
  verdict.word === "no data"
    ? notice("Nothing was judged", verdict.sentence)
    : notice("Nothing was found", "A healthy run is silent.");

/** The finding that is the verdict does not say its sentence again below it: its place stands there instead. */
function card(finding, verdict, open, go) {
  const said = finding.headline === verdict.sentence;
  return h(
    "details",
    { class: "finding", "data-severity": finding.severity, "data-key": finding.key, open },
    h(
      "summary",
      {},
      h("span", { class: "finding-kind" }, icon(finding.severity), SEVERITY[finding.severity], " · ", words(finding.kind)),
      said ? where(finding) && h("h3", {}, h("code", {}, where(finding))) : h("h3", {}, prose(finding.headline)),
    ),
    h("p", { class: "muted small" }, about(finding, said)),
    momentLink({ finding: finding.key, at: null }, span(finding), "Show on the timeline: ", go),
    finding.evidence.length > 0 && [h("h4", {}, "Evidence"), h("ul", { class: "evidence" }, finding.evidence.map((e) => evidence(e, finding, go)))],
    finding.advice.length > 0 && [h("h4", {}, "What to do"), h("ol", { class: "advice" }, finding.advice.map(advice))],
  );
}

const words = (kind) => kind.replaceAll("_", " ");

const where = (finding) => finding.module || finding.tensor;

function about(finding, said) {
  const there = !said && where(finding);
  const parts = [
    STATE[finding.state],
    `${Math.round(100 * finding.confidence)} % sure`,
    finding.rank > 0 && `rank ${finding.rank}`,
    finding.stream > 0 && `stream ${finding.stream}`,
  ];
  const text = parts.filter(Boolean).join(" · ");
  return there ? [`${text} · in `, h("code", {}, there)] : text;
}

function span(finding) {
  const first = moment(finding.first_step, finding.first_attempt);
  if (finding.state === "open") return `since ${first}`;
  if (finding.last_attempt <= finding.first_attempt) return first;
  if (finding.last_step === finding.first_step && finding.first_step >= 0) {
    return `step ${count(finding.first_step)}, attempts ${count(finding.first_attempt)} to ${count(finding.last_attempt)}`;
  }
  return `${first} to ${moment(finding.last_step, finding.last_attempt)}`;
}

function evidence(item, finding, go) {
  const link = item.attempt >= 0 && momentLink({ finding: finding.key, at: place(item.attempt, finding.producer) }, `attempt ${count(item.attempt)}`, "", go);
  const known = item.text.includes(item.tensor) || item.tensor === where(finding);
  const tensor = item.tensor && !known && h("code", {}, item.tensor);
  return h("li", {}, prose(item.text), tensor && [" ", tensor], link && [" ", link]);
}

/** A real link, so that it can be copied and opened elsewhere; here it moves the view instead of loading the page. */
function momentLink(patch, text, before, go) {
  const onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(patch);
  };
  const href = address({ ...patch, from: null, to: null });
  return h("a", { class: "moment", href, onclick, "aria-label": before ? before + text : null }, text);
}

const advice = (item) => h("li", {}, prose(item.text), item.code && codeBlock(item.code));
