// The table of events: the timeline's marks as text, and what no plot shows.

import { get, getAll, runPath } from "./api.js";
import { download } from "./csv.js";
import { byId, h, render } from "./dom.js";
import { count, dateTime, plural, real, text } from "./format.js";
import { scale } from "./math.js";
import { place } from "./places.js";
import { notice, problemNotice } from "./shell.js";

const PAGE = 100;
const TYPES = ["skip", "growth", "backoff", "set", "restored", "went_on", "call_fault", "finite_check", "forward_search", "operations", "accumulated", "local_gradients", "check", "calls", "loss_dtype", "run", "scaler", "stream", "optimizers", "tensors", "origin", "autocast", "backward_order", "observers", "replicas", "float32_check", "fused_step", "weights", "sparse_overflow", "captured", "fault", "dropped", "heartbeat", "finish"];
const COLUMNS = ["Step", "Attempt", "Event", "Scale", "Details"];

let items = [];
let next = null;

export function setUpEvents(run, go) {
  const select = byId("event-type");
  select.append(h("option", { value: "" }, "All events"), ...TYPES.map((type) => h("option", { value: type }, words(type))));
  select.addEventListener("change", () => loadEvents(run, go));
  byId("events-csv").addEventListener("click", () => save(run).catch((problem) => showProblem(problem, () => save(run))));
}

/** Load the first page anew, or the next one behind what is shown. */
export async function loadEvents(run, go, cursor = null) {
  const query = { type: byId("event-type").value, cursor, limit: cursor ? PAGE : Math.max(PAGE, items.length) };
  try {
    const page = await get(runPath(run, "/events"), query);
    items = cursor ? [...items, ...page.items] : page.items;
    next = page.next;
    render(byId("events"), [items, next], () => (items.length ? [table(go), more(run, go)] : notice("No events", "")));
  } catch (problem) {
    showProblem(problem, () => loadEvents(run, go));
  }
}

const showProblem = (problem, retry) => render(byId("events"), problem.message, () => problemNotice(problem, retry));

const words = (type) => type.replaceAll("_", " ");

function table(go) {
  const head = h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)));
  const body = h("tbody", {}, items.map((event) => row(event, go)));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" }, h("table", { class: "events" }, h("thead", {}, head), body));
}

function row(event, go) {
  const at = event.attempt >= 0;
  const show = h("button", { class: "moment", type: "button", onclick: () => go({ at: place(event.attempt, event.producer), finding: null }) }, count(event.attempt));
  return h(
    "tr",
    {},
    h("td", { class: "number" }, event.step >= 0 ? count(event.step) : ""),
    h("td", { class: "number" }, at && show),
    h("td", { title: dateTime(event.time) }, h("span", { class: "event-type", "data-type": event.type }, words(event.type)), event.repeat > 1 && ` × ${count(event.repeat)}`),
    h("td", { class: "number" }, scaleText(event.data)),
    h("td", { class: "details" }, details(event)),
  );
}

function scaleText(data) {
  if (data.scale === undefined) return "";
  return data.scale_after === undefined || data.scale_after === data.scale ? scale(data.scale) : [scale(data.scale), " → ", scale(data.scale_after)];
}

const DETAILS = {
  skip: (d) => `loss ${real(d.loss)}, ${plural(d.n_inf, "inf", "inf")} and ${plural(d.n_nan, "NaN", "NaN")} elements in ${plural(d.count, "tensor")}`,
  scaler: (d) => ["first scale ", scale(d.init_scale), `, ${text(d.class)}, growth × ${real(d.growth_factor)} every ${plural(d.growth_interval, "attempt")}, backoff × ${real(d.backoff_factor)}`],
  stream: (d) => `scaler ${d.scaler} with optimizers ${d.optimizers.join(", ")}`,
  optimizers: (d) => d.optimizers.map((o) => `${o.class}${o.fused ? ", fused" : ""}, ${plural(o.tensors, "tensor")}`).join("; "),
  autocast: (d) => `${d.dtype} on ${d.device}`,
  loss_dtype: (d) => d.dtype,
  calls: (d) => d.order.join(" → "),
  call_fault: (d) => `${words(d.fault)}: ${d.order.join(" → ")}`,
  finite_check: (d) => (d.parameters.count + d.buffers.count === 0 ? "all finite" : `${nonfinite(d.parameters, "parameter")}, ${nonfinite(d.buffers, "buffer")}`),
  forward_search: (d) => (d.origin ? `began in ${d.origin.module} (${d.origin.module_type})` : "no module found"),
  operations: (d) => [softmax(d.softmax), d.loss.float16.length > 0 && `float16 on the way to the loss: ${d.loss.float16.join(", ")}`].filter(Boolean).join("; ") || "nothing of note",
  accumulated: (d) => (d.nonfinite.length > 0 ? `not finite as backward left it: optimizer ${d.nonfinite.join(", ")}` : "finite as backward left it, although the loss is not"),
  local_gradients: (d) => `${count(d.nonfinite.length)} of ${plural(d.tensors.length, "tensor")} not finite on this rank`,
  check: (d) => `${d.class}, ${plural(d.trainable, "trainable parameter")}, ${count(d.with_grad)} with a gradient`,
  observers: (d) => `${plural(d.hooks, "hook")} on: ${d.observers.map(words).join(", ")}; ${words(d.why)}`,
  weights: (d) => `${count(d.moved)} of ${plural(d.compared, "weight")} changed in ${plural(d.steps, "step")}`,
  heartbeat: () => "",
  tensors: (d) => plural(d.tensors.length, "tensor"),
  backward_order: (d) => plural(d.tensors.length, "tensor"),
  origin: (d) => plural(Object.keys(d.origins).length, "tensor"),
  finish: (d) => `${plural(d.attempts, "attempt")}, ${count(d.taken)} taken, ${count(d.skipped)} skipped`,
  run: (d) => [d.host, d.device, d.versions?.torch && `torch ${d.versions.torch}`, failed(d)].filter(Boolean).join(", "),
  growth: () => "",
  backoff: () => "",
  set: () => "",
  restored: () => "",
  went_on: () => "weights as the last update left them",
};

const softmax = (found) => found && `softmax in ${found.module}: ${count(found.masked)} of ${plural(found.rows, "row")} fully masked, ${count(found.overflowed)} overflowed`;

const nonfinite = (check, noun) => `${count(check.count)} of ${plural(check.checked, noun)} not finite`;

function failed(run) {
  const times = Object.values(run.faults ?? {}).reduce((sum, n) => sum + n, 0);
  return times ? `ampwatch itself failed ${plural(times, "time")}, training went on` : "";
}

function details(event) {
  try {
    return (DETAILS[event.type] ?? JSON.stringify)(event.data);
  } catch {
    return JSON.stringify(event.data); // a producer need not send every field of docs/format.md
  }
}

const more = (run, go) =>
  next !== null && h("button", { class: "button more", type: "button", onclick: () => loadEvents(run, go, next) }, "Show more");

/** Every event of the chosen kind, not only those that the table shows by now. */
async function save(run) {
  const all = await getAll(runPath(run, "/events"), { type: byId("event-type").value, limit: 1000 });
  const header = ["time_s", "rank", "producer", "type", "attempt", "step", "stream", "repeat", "data"];
  const rows = all.map((e) => [e.time, e.rank, e.producer, e.type, e.attempt, e.step, e.stream, e.repeat, JSON.stringify(e.data)]);
  download(`ampwatch-${run}-events.csv`, header, rows);
}
