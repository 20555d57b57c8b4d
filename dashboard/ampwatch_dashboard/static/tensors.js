// Tensors: the heatmap of one statistic, and the histogram of the tensor that was chosen in it.

import { get, getAll, runPath } from "./api.js";
import { download } from "./csv.js";
import { byId, h, render } from "./dom.js";
import { count } from "./format.js";
import { notice, theme } from "./shell.js";
import { draw, onRange } from "./plot.js";
import { rangeQuery } from "./range.js";

const HELP = {
  lost_share: "Share of elements that were too small for float16 and became zero: an estimate, for gradients computed in float16. A larger scale keeps them. Blank where it is not known that float16 was used.",
  headroom_log2: "Factors of two between the largest scaled gradient and 65504, where float16 ends. At zero the next growth overflows.",
  subnormal_share: "Share of elements below 2⁻¹⁴, where each halving loses a bit of precision.",
  zero_share: "Share of elements that are exactly zero: lost to underflow, or zero by nature, such as rows of an embedding that were not looked up.",
  nonfinite: "Infinite and NaN elements. The tensors nearest the origin hold infinities; NaN is usually carried.",
  norm: "L2 norm of the true gradient, the scale divided out. Empty where an element was not finite.",
};
const ROWS = 40; // the worst; a page of several thousand rows helps nobody until it is asked for
const heatmap = byId("heatmap-plot");
const histogram = byId("histogram-plot");

let wired = false;

export async function loadTensors(run) {
  const tensors = await getAll(runPath(run, "/tensors"), { limit: 1000 });
  render(byId("tensor"), tensors.map((tensor) => [tensor.id, tensor.name]), () => [
    h("option", { value: "" }, "Choose a tensor"),
    ...tensors.map((tensor) => h("option", { value: tensor.id }, tensor.name)),
  ]);
  return tensors;
}

export async function drawHeatmap(run, view, { choose, moved }) {
  byId("stat").value = view.stat;
  byId("stat-help").textContent = HELP[view.stat];
  const figure = await get(runPath(run, "/figures/heatmap"), { theme: theme(), stat: view.stat, rows: view.all ? null : ROWS, rank: view.rank, ...rangeQuery(view.range) });
  if (!figure.data[0].x.length) return showEmptyHeatmap(view);
  if (!wired) heatmap.replaceChildren();
  await draw(heatmap, figure, view.range, `ampwatch-${run}-${view.stat}`);
  if (wired) return;
  wired = true;
  heatmap.on("plotly_click", (event) => choose(String(heatmap.layout.meta.tensors[event.points[0].y])));
  onRange(heatmap, moved);
}

function showEmptyHeatmap(view) {
  if (wired) window.Plotly.purge(heatmap);
  wired = false;
  heatmap.removeAttribute("style");
  const where = view.range ? "in this part of the run" : "yet";
  heatmap.replaceChildren(notice(`No tensor was recorded ${where}`, "Tensors are recorded every few attempts, and around a skip."));
}

export function showRowsButton(tensors, all) {
  const button = byId("all-rows");
  button.hidden = tensors.length <= ROWS;
  button.textContent = all ? `Only the ${ROWS} worst` : `Show all ${count(tensors.length)}`;
  button.setAttribute("aria-pressed", String(all));
}

export async function drawHistogram(run, view, tensors) {
  const tensor = tensors.find(({ id }) => String(id) === view.tensor);
  byId("tensor").value = tensor ? view.tensor : "";
  byId("histogram-help").hidden = Boolean(tensor);
  histogram.hidden = !tensor;
  byId("histogram-title").textContent = tensor ? `Histogram of ${tensor.name}` : "Histogram";
  if (!tensor) return;
  const query = { theme: theme(), tensor: tensor.id, rank: view.rank, ...rangeQuery(view.range) };
  const figure = await get(runPath(run, "/figures/histogram"), query);
  await draw(histogram, figure, view.range, `ampwatch-${run}-histogram`);
}

export function saveTensors(run, tensors) {
  const header = ["id", "name", "module", "module_type", "shape", "dtype", "elements", "optimizer", "origin", "rank", "producer"];
  const rows = tensors.map((t) => [t.id, t.name, t.module, t.module_type, t.shape?.join("×"), t.dtype, t.numel, t.optimizer, t.origin, t.rank, t.producer]);
  download(`ampwatch-${run}-tensors.csv`, header, rows);
}
