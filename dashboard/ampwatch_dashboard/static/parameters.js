// The parameters of a scaler as controls: sliders over what people choose from, numbers for the rest.

import { h } from "./dom.js";

const INTERVALS = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
const SCALE_LOG2 = { min: -24, max: 40 };

const isScale = (name, value) => typeof value === "number" && /scale|scaling/.test(name) && !/window|factor/.test(name);
const isInterval = (name, value) => Number.isInteger(value) && /interval|window|period|steps/.test(name);
const isFactor = (name, value) => typeof value === "number" && /factor|ratio/.test(name) && value > 0;

/** A row for one parameter; `changed(name, value)` is called as it moves. */
export function control(name, value, changed) {
  if (typeof value === "boolean") return choice(name, value, changed);
  if (isScale(name, value) && value > 0) {
    const at = Math.round(Math.log2(value));
    return slider(name, { ...SCALE_LOG2, step: 1, at }, (k) => 2 ** k, power, changed);
  }
  if (isInterval(name, value)) {
    const known = [...new Set([...INTERVALS, value])].sort((a, b) => a - b);
    const range = { min: 0, max: known.length - 1, step: 1, at: known.indexOf(value) };
    return slider(name, range, (i) => known[i], (i) => `${known[i].toLocaleString("en")} steps`, changed);
  }
  if (isFactor(name, value)) {
    const [min, max] = value < 1 ? [0.1, 0.95] : [1.05, 4];
    return slider(name, { min, max, step: 0.05, at: value }, Number, (x) => `× ${Number(x.toFixed(3))}`, changed);
  }
  return number(name, value, changed);
}

/** A power of two, its exponent raised. */
const power = (k) => h("span", {}, "2", h("sup", {}, String(k).replace("-", "−")));

const label = (name) => name.replaceAll("_", " ");

function slider(name, { min, max, step, at }, valueOf, shown, changed) {
  const output = h("b", {}, shown(at));
  const oninput = (event) => {
    const place = Number(event.target.value);
    output.replaceChildren(shown(place));
    changed(name, valueOf(place));
  };
  const input = h("input", { type: "range", name, min, max, step, value: at, oninput, "aria-label": label(name) });
  return h("label", { class: "parameter" }, h("span", {}, label(name)), output, input);
}

function number(name, value, changed) {
  const oninput = (event) => changed(name, event.target.value === "" ? null : Number(event.target.value));
  const input = h("input", { type: "number", name, step: "any", min: 0, value: value ?? "", placeholder: "none", oninput });
  return h("label", { class: "parameter" }, h("span", {}, label(name)), input);
}

function choice(name, value, changed) {
  const onchange = (event) => changed(name, event.target.value === "true");
  const options = [false, true].map((one) => h("option", { value: one, selected: one === value }, one ? "yes" : "no"));
  return h("label", { class: "parameter" }, h("span", {}, label(name)), h("select", { name, onchange }, options));
}
