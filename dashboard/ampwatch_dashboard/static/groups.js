// Groups of runs: restarts of one job and the runs of a sweep bear one name, or one but for what stands behind it.

import { h } from "./dom.js";
import { plural } from "./format.js";
import { tally } from "./verdict.js";

// What launchers put behind a name: a number, a hash, or a setting, as in "gpt-3", "gpt_a1b2c3d", "gpt lr=0.1".
const BEHIND = /[-_ .#]+(?:[a-z_.]+=\S+|(?:run|trial|restart|seed|v)?\d+|[0-9a-f]{6,})$/i;

const folded = new Set();

/** The name that restarts and the runs of a sweep share. */
export function stem(name) {
  const shorter = name.replace(BEHIND, "");
  return shorter === name || !shorter ? name : stem(shorter);
}

/** Runs in groups, in the order in which the first of each stands; one group without a title where none are wanted. */
export function grouped(runs, by) {
  if (!by) return [{ key: "", title: "", runs }];
  const found = new Map();
  for (const run of runs) {
    const title = by === "project" ? run.project || "no project" : stem(run.name || run.run);
    const key = `${by} ${run.project} ${title}`;
    if (!found.has(key)) found.set(key, { key, title, runs: [] });
    found.get(key).runs.push(run);
  }
  return [...found.values()];
}

/** A table body for each group, headed by what it holds; a group of one run by name needs no head. */
export function bodies(groups, row, columns, changed) {
  return groups.map(({ key, title, runs }) => {
    const headed = title && (runs.length > 1 || key.startsWith("project"));
    const rows = headed && folded.has(key) ? [] : runs.map(row);
    return h("tbody", { role: "rowgroup" }, headed && head(key, title, runs, columns, changed), rows);
  });
}

function head(key, title, runs, columns, changed) {
  const toggle = () => {
    if (!folded.delete(key)) folded.add(key);
    changed();
    document.querySelector(`[data-group="${CSS.escape(key)}"]`)?.focus();
  };
  const told = [plural(runs.length, "run"), ...tally(runs)].join(" · ");
  const button = h("button", { class: "fold", type: "button", "data-group": key, "aria-expanded": String(!folded.has(key)), onclick: toggle }, title);
  return h("tr", { role: "row", class: "group" }, h("th", { role: "rowheader", scope: "rowgroup", colspan: columns }, button, h("span", { class: "muted small" }, told)));
}
