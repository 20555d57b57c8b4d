// Runs before the first paint, so that a chosen theme does not flash the other one. Not a module: those wait.
(() => {
  let chosen = new URLSearchParams(location.search).get("theme");
  try {
    chosen ??= localStorage.getItem("ampwatch.theme");
  } catch {
    // Storage is forbidden here: the system's theme stands.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
