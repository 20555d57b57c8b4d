// Numbers as people read them, each with its unit.

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NAMED = { NaN: "NaN", Infinity: "∞", "-Infinity": "−∞" };
export const MISSING = "–";

/** A whole number; what a training job sent in its place is missing. */
export const count = (value) => (typeof value === "number" ? integer.format(value) : MISSING);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** A real of the API: NaN and infinities arrive as strings, missing as null. */
export function real(value, digits = 4) {
  if (typeof value !== "number") return NAMED[value] ?? MISSING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e").replace("-", "−");
  return new Intl.NumberFormat("en", { maximumSignificantDigits: digits }).format(value);
}

export function percent(part, whole) {
  if (!whole) return MISSING;
  const share = (100 * part) / whole;
  return `${share === 0 ? "0" : share < 0.1 ? "< 0.1" : share.toFixed(share < 10 ? 1 : 0)} %`;
}

/** "3 min ago"; `seconds` is Unix time. */
export function ago(seconds, now = Date.now() / 1000) {
  if (seconds == null) return MISSING;
  const age = Math.max(0, now - seconds);
  if (age < 5) return "just now";
  const units = [[60, "s", 1], [3600, "min", 60], [86400, "h", 3600], [Infinity, "d", 86400]];
  const [, unit, size] = units.find(([limit]) => age < limit);
  return `${Math.floor(age / size)} ${unit} ago`;
}

export const dateTime = (seconds) =>
  seconds == null ? MISSING : new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** What a training job sent where a word is expected. */
export const text = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? MISSING));

/** A moment as the user counts it, with the attempt beside it where the two differ. */
export const moment = (step, attempt) =>
  step == null || step < 0 || step === attempt ? `step ${count(attempt)}` : `step ${count(step)} (attempt ${count(attempt)})`;
