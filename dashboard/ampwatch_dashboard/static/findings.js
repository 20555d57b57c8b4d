// Findings: what, the evidence with a link to each moment, and what to do, with code to copy.

import { codeBlock } from "./code.js";
import { byId, h, render } from "./dom.js";
import { ago, count, dateTime, moment } from "./format.js";
import { icon } from "./icons.js";
import { prose } from "./math.js";
import { place } from "./places.js";
import { address } from "./state.js";
import { notice } from "./shell.js";

const SEVERITY = { fatal: "Fatal", error: "Error", warning: "Warning", info: "Info" };
const STATE = { open: "still going on", recovered: "recovered", explained: "explained", acknowledged: "acknowledged" };

/** Show the list, muted ones last; `go(patch)` moves the view to a moment, `mark(key, mark)` is for what people say of one. */
export function showFindings(findings, verdict, chosen, { go, mark }) {
  const list = byId("findings-list");
  const open = new Map([...list.querySelectorAll("details[data-key]")].map((element) => [element.dataset.key, element.open]));
  byId("findings-count").textContent = findings.length ? count(findings.length) : "";
  const unfolded = (finding) => open.get(finding.key) ?? (finding.severity !== "info" && !finding.mark);
  const inOrder = [...findings.filter(heard), ...findings.filter((finding) => !heard(finding))];
  render(list, [findings, verdict], () =>
    findings.length ? inOrder.map((finding) => card(finding, verdict, unfolded(finding), { go, mark })) : none(verdict),
  );
  for (const element of list.querySelectorAll("[data-key]")) {
    element.toggleAttribute("data-chosen", element.dataset.key === chosen);
  }
}

const heard = (finding) => finding.mark !== "muted";

const none = (verdict) =>
  verdict.word === "no data"
    ? notice("Nothing was judged", verdict.sentence)
    : notice("Nothing was found", "A healthy run is silent.");

/** The finding that is the verdict does not say its sentence again below it: its place stands there instead. */
function card(finding, verdict, open, { go, mark }) {
  const said = finding.headline === verdict.sentence;
  return h(
    "details",
    { class: "finding", "data-severity": finding.severity, "data-key": finding.key, "data-mark": finding.mark, open },
    h(
      "summary",
      {},
      h("span", { class: "finding-kind" }, icon(finding.severity), SEVERITY[finding.severity], " · ", words(finding.kind), finding.mark && h("span", { class: "tag" }, finding.mark)),
      said ? where(finding) && h("h3", {}, h("code", {}, where(finding))) : h("h3", {}, prose(finding.headline)),
    ),
    h("p", { class: "muted small" }, about(finding, said)),
    momentLink({ finding: finding.key, at: null }, span(finding), "Show on the timeline: ", go),
    finding.chain?.length > 0 && [h("h4", {}, "What came first"), h("ol", { class: "chain" }, finding.chain.map((event) => link(event, finding, go)))],
    finding.evidence.length > 0 && [h("h4", {}, "Evidence"), h("ul", { class: "evidence" }, finding.evidence.map((e) => evidence(e, finding, go)))],
    finding.advice.length > 0 && [h("h4", {}, "What to do"), h("ol", { class: "advice" }, finding.advice.map(advice))],
    h("div", { class: "marks" }, marks(finding, mark)),
  );
}

function marks(finding, mark) {
  const button = (text, value, title) => h("button", { class: "button quiet", type: "button", title, onclick: () => mark(finding.key, value) }, text);
  if (finding.mark) return [h("span", { class: "muted small", title: dateTime(finding.marked_at) }, `${finding.mark} by ${finding.marked_by}, ${ago(finding.marked_at)}`), button("Undo", null, "Take the mark away")];
  return [
    button("Acknowledge", "acknowledged", "Someone knows: no alert is sent of it"),
    button("Mute", "muted", "No alert is sent of it, nor of others of its kind in this run; it moves to the end"),
  ];
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

/** One event of the chain, in the order in which they began. */
function link(event, finding, go) {
  const at = { finding: finding.key, at: place(event.attempt, finding.producer) };
  return h("li", {}, event.text, " ", momentLink(at, moment(event.step, event.attempt), "", go));
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
