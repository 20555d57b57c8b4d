// The state of a view lies in its address, so that every link and bookmark shows what its author saw.

export const read = () => Object.fromEntries(new URLSearchParams(location.search));

/** The address with `patch` applied: null or "" removes a name. */
export function address(patch) {
  const target = new URL(location.href);
  for (const [name, value] of Object.entries(patch)) {
    if (value == null || value === "") target.searchParams.delete(name);
    else target.searchParams.set(name, value);
  }
  target.hash = "";
  return target.href;
}

/** Write state; `push` makes a step that the back button undoes. */
export function write(patch, push = false) {
  const target = address(patch);
  if (target !== location.href) history[push ? "pushState" : "replaceState"](null, "", target);
}
