// Powers of two, set as people write them. The caret is there for those who listen and those who copy.

import { h } from "./dom.js";
import { real } from "./format.js";

const POWER = /2\^([-−]?\d+)/;

const power = (exponent) => h("span", { class: "power" }, "2", h("span", { class: "visually-hidden" }, "^"), h("sup", {}, exponent));

export const isPower = (value) => typeof value === "number" && value > 0 && Number.isInteger(Math.log2(value));

/** A loss scale: as a power of two where it is one. */
export const scale = (value) => (isPower(value) ? power(String(Math.log2(value)).replace("-", "−")) : real(value, 6));

/** A sentence of the server's, its `2^16` set as powers. */
export const prose = (text) => text.split(POWER).map((part, i) => (i % 2 ? power(part.replace("-", "−")) : part));
