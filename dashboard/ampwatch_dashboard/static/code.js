// Code to copy.

import { h } from "./dom.js";

export function codeBlock(code) {
  const block = h("code", {}, code);
  const button = h("button", { class: "button quiet copy", type: "button", onclick: () => copy(code, block, button) }, "Copy");
  const head = h("div", { class: "code-head" }, "Python", button);
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0", role: "region", "aria-label": "Code to paste" }, block));
}

/** Browsers give the clipboard to secure pages only; on a plain-http host the code is selected instead. */
async function copy(code, block, button) {
  try {
    await navigator.clipboard.writeText(code);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(block);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
