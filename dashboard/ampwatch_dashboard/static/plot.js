// Plotly, loaded once and only where there is something to draw: 4.8 MB must not hold up the words of a page.

import { ROOT } from "./api.js";

const CONFIG = {
  displaylogo: false,
  responsive: true,
  showTips: false,
  // Named one by one: some of Plotly's own set would send the data to another host.
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};
const NARROW_PX = 520;
const touch = matchMedia("(pointer: coarse)");

let loading = null;

/** Begin to load; `draw` waits for it. */
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("assets/plotly.min.js", ROOT);
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("The plotting library could not be loaded"));
    document.head.append(script);
  });
  return loading;
}

/** Draw a figure of the API in place of the one before it; `range` is the part of the x axis to show, or null for all. */
export async function draw(element, figure, range, name) {
  const { react } = await plotly();
  const { data, layout } = figure;
  layout.dragmode = touch.matches ? false : "zoom"; // a finger scrolls the page
  showRange(layout.xaxis, range);
  if (element.clientWidth < NARROW_PX) makeNarrow(figure);
  if (layout.height) element.style.height = `${layout.height}px`;
  await react(element, data, layout, { ...CONFIG, toImageButtonOptions: { filename: name, scale: 2 } });
}

/** Tensors by short names, which hovering and the list tell in full; the colour bar over the whole width. */
function makeNarrow({ data, layout }) {
  if (layout.meta?.short_names) layout.yaxis.ticktext = layout.meta.short_names;
  for (const { colorbar } of data) if (colorbar) Object.assign(colorbar, { len: 1, tickangle: 0, title: { text: "" } });
}

function showRange(xaxis, range) {
  xaxis.autorange = range === null;
  if (range) xaxis.range = [...range];
}

/** Call `moved([from, to])`, or `moved(null)` for the whole, when a person zooms or pans along x. */
export function onRange(element, moved) {
  element.on("plotly_relayout", (change) => {
    if (change["xaxis.autorange"]) moved(null);
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0];
    const to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (from != null) moved([Number(from), Number(to)]);
  });
}
