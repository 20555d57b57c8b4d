// Elements from data. Strings always become text nodes: nothing that a training job named is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

const shown = (children) => [children].flat(Infinity).filter((child) => child != null && child !== false);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...shown(children));
  return element;
}

/** An HTML element: `h("a", {href, onclick}, "text", other)`. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Replace what an element holds, only if `key` differs from the last time: keeps focus, selection and open details. */
export function render(element, key, build) {
  const text = JSON.stringify(key);
  if (element.renderedKey === text) return false;
  element.renderedKey = text;
  element.replaceChildren(...shown(build()));
  return true;
}
