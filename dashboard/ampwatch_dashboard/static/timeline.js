// The timeline: draws the part of the run that the address names, and marks the finding and the moment in it.

import { get, runPath } from "./api.js";
import { byId } from "./dom.js";
import { count } from "./format.js";
import { draw, onRange } from "./plot.js";
import { rangeQuery } from "./range.js";
import { theme } from "./shell.js";

const element = byId("timeline-plot");

let wired = false;

export async function drawTimeline(run, view, moved) {
  const points = Math.min(1200, Math.max(200, element.clientWidth));
  const figure = await get(runPath(run, "/figures/timeline"), { theme: theme(), points, rank: view.rank, ...rangeQuery(view.range) });
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
