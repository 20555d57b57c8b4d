// The few icons, drawn with the colour of the text beside them. Each stands next to words, so none is announced.

import { s } from "./dom.js";

const PATHS = {
  healthy: ["M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z", "m5 8.2 2.1 2.1L11 6.2"],
  warning: ["M8 2 1.5 13.5h13L8 2Z", "M8 6.5v3.2", "M8 11.6v.1"],
  failing: ["M5.2 1.5h5.6l3.7 3.7v5.6l-3.7 3.7H5.2l-3.7-3.7V5.2l3.7-3.7Z", "m5.8 5.8 4.4 4.4", "m10.2 5.8-4.4 4.4"],
  "no data": ["M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z", "M5.2 8h5.6"],
  info: ["M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13Z", "M8 7.3v3.7", "M8 5v.1"],
  light: ["M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6Z", "M8 1.2v1.5M8 13.3v1.5M1.2 8h1.5M13.3 8h1.5M3.2 3.2l1 1M11.8 11.8l1 1M12.8 3.2l-1 1M4.2 11.8l-1 1"],
  dark: ["M13.5 9.6A6 6 0 0 1 6.4 2.5a6 6 0 1 0 7.1 7.1Z"],
};
const SEVERITY = { fatal: "failing", error: "failing", warning: "warning", info: "info" };

export function icon(name, size = 16) {
  const shape = { fill: "none", stroke: "currentColor", "stroke-width": 1.5, "stroke-linecap": "round", "stroke-linejoin": "round" };
  const paths = PATHS[SEVERITY[name] ?? name].map((d) => s("path", { d }));
  return s("svg", { viewBox: "0 0 16 16", width: size, height: size, "aria-hidden": "true", class: "icon", ...shape }, paths);
}
