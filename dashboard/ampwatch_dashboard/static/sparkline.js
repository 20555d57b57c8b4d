// A loss curve the size of a word.

import { s } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 28;
const PAD = 3;

/** Values as the API gives them; NaN and infinities are dots at the top, missing ones are gaps. */
export function sparkline(values, label) {
  const finite = values.filter((value) => typeof value === "number");
  const low = Math.min(...finite);
  const span = Math.max(...finite) - low || 1;
  const x = (i) => PAD + (i * (WIDTH - 2 * PAD)) / Math.max(1, values.length - 1);
  const y = (value) => HEIGHT - PAD - ((value - low) * (HEIGHT - 2 * PAD)) / span;
  let path = "";
  let down = false;
  const marks = [];
  values.forEach((value, i) => {
    const drawn = typeof value === "number";
    if (drawn) path += `${down ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    if (typeof value === "string") marks.push(s("circle", { cx: x(i).toFixed(1), cy: PAD, r: 2, class: "spark-bad" }));
    down = drawn;
  });
  const size = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT };
  return s("svg", { ...size, class: "spark", role: "img", "aria-label": label }, s("path", { d: path }), marks);
}
