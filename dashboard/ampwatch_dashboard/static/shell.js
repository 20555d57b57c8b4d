// What every page has: the theme switch, the state of the connection, and how a problem looks.

import { byId, h } from "./dom.js";
import { icon } from "./icons.js";
import { write } from "./state.js";

const system = matchMedia("(prefers-color-scheme: dark)");

export const theme = () => document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");

/** Wire the switch; `onchange` redraws what does not follow the style sheet by itself. */
export function setUpTheme(onchange = () => {}) {
  const button = byId("theme");
  const show = () => {
    const other = theme() === "dark" ? "light" : "dark";
    button.replaceChildren(icon(other));
    button.setAttribute("aria-label", `Switch to the ${other} theme`);
    button.title = `Switch to the ${other} theme`;
  };
  const changed = () => {
    show();
    onchange();
  };
  button.addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    write({ theme: next });
    remember(next);
    changed();
  });
  system.addEventListener("change", changed);
  show();
}

function remember(chosen) {
  try {
    localStorage.setItem("ampwatch.theme", chosen);
  } catch {
    // Storage is forbidden here: the address still carries the choice.
  }
}

const CONNECTION = {
  open: "Live",
  connecting: "Connecting…",
  lost: "Connection lost, trying again…",
  paused: "Paused while hidden",
};

export function showConnection(state) {
  const element = byId("connection");
  element.dataset.state = state;
  element.textContent = CONNECTION[state];
}

/** A problem, or the lack of anything to show, in words that can be acted on. */
export function notice(title, detail, action) {
  return h("div", { class: "notice" }, h("strong", {}, title), detail && h("p", {}, coded(detail)), action);
}

/** A sentence, what stands between backticks in it set as code. */
const coded = (sentence) => sentence.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

export const problemNotice = (problem, retry) =>
  notice(
    problem.message,
    problem.detail,
    retry && h("button", { class: "button", type: "button", onclick: retry }, "Try again"),
  );
