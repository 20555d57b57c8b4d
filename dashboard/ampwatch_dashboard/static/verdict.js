// The verdict over a run, and the state it is in: a word, a colour and an icon together, never colour alone.

import { h } from "./dom.js";
import { icon } from "./icons.js";

export const WORDS = { healthy: "Healthy", warning: "Warning", failing: "Failing", "no data": "No data" };
const STATUSES = { live: "Live", finished: "Finished", stalled: "Stalled", crashed: "Crashed" };
const STATUS_HELP = {
  live: "Records are arriving",
  finished: "The training process has ended and said so",
  stalled: "The process is alive, but has made no attempt for a while",
  crashed: "Silent, and it never said that it ended",
};

/** The sentence of a verdict that stands beside its word, without saying the word again. */
export const sentence = ({ word, sentence }) =>
  sentence.replace(new RegExp(`^${word}: (.)`, "i"), (_, first) => first.toUpperCase());

export const badge = (word) => h("span", { class: "badge", "data-word": word }, icon(word), WORDS[word]);

/** How many runs are live, failing and warned of, without those that are none: ["1 live", "2 failing"]. */
export function tally(runs) {
  const counted = [["live", "status"], ["failing", "verdict"], ["warning", "verdict"]].map(([word, of]) => [word, runs.filter((run) => (of === "status" ? run.status : run.verdict.word) === word).length]);
  return counted.filter(([, n]) => n > 0).map(([word, n]) => `${n} ${word}`);
}

export const status = (name) =>
  h("span", { class: "status", "data-status": name, title: STATUS_HELP[name] }, STATUSES[name] ?? name);
