// The timeline: draws the part of the run that the address names, and marks the finding and the moment in it.

import { get, runPath } from "./api.js";
import { byId } from "./dom.js";
import { count } from "./format.js";
import { draw, onRange } from "./plot.js";
import { theme } from "./shell.js";

const element = byId("timeline-plot");
const BESIDE = 0.5; // of the shown range, loaded on either side of it so that panning shows something at once

let wired = false;

export function rangeQuery(range) {
  if (range === null) return {};
  const beside = BESIDE * (range[1] - range[0]);
  return { from: Math.max(0, Math.floor(range[0] - beside)), to: Math.ceil(range[1] + beside) };
}

export async function drawTimeline(run, view, moved) {
  const points = Math.min(1200, Math.max(200, element.clientWidth));
  const figure = await get(runPath(run, "/figures/timeline"), { theme: theme(), points, ...rangeQuery(view.range) });
  mark(figure.layout, view);
  await draw(element, figure, view.range, `ampwatch-${run}-timeline`);
  if (!wired) onRange(element, moved);
  wired = true;
  showRangeText(view.range);
}

/** Outline the chosen finding; draw a line at the chosen moment. */
function mark(layout, view) {
  const accent = layout.modebar.activecolor;
  for (const shape of layout.shapes) {
    if (shape.name === view.finding) Object.assign(shape, { line: { width: 2, color: accent } });
  }
  if (view.at === null) return;
  layout.shapes.push({
    type: "line", name: "moment", xref: "x", yref: "paper", x0: view.at, x1: view.at, y0: 0, y1: 1,
    line: { width: 1.5, color: accent, dash: "dot" },
  });
}

function showRangeText(range) {
  byId("range").textContent = range ? `attempts ${count(Math.max(0, range[0]))} to ${count(range[1])}` : "";
  byId("whole").hidden = range === null;
}
