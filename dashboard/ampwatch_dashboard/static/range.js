// The part of a run to ask for: what is shown, and some beside it.

const BESIDE = 0.5; // of the shown range, loaded on either side of it so that panning shows something at once

export function rangeQuery(range) {
  if (range === null) return {};
  const beside = BESIDE * (range[1] - range[0]);
  return { from: Math.max(0, Math.floor(range[0] - beside)), to: Math.ceil(range[1] + beside) };
}
