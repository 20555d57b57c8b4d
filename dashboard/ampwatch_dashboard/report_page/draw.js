// Draws the figures that the report carries, each as wide as the page.
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = { displaylogo: false, responsive: true, showTips: false, modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };
for (const element of document.querySelectorAll("[data-figure]")) {
  const { data, layout } = figures[element.dataset.figure];
  if (layout.height) element.style.height = `${layout.height}px`;
  if (element.clientWidth < 520 && layout.meta?.short_names) layout.yaxis.ticktext = layout.meta.short_names;
  window.Plotly.newPlot(element, data, layout, config);
}
