// One event stream for the page. A browser allows six connections to a host over all tabs: a hidden page closes its own.

import { url } from "./api.js";
import { showConnection } from "./shell.js";

const RETRY_MS = 3000;

/** Follow one run, or all of them without `run`. `onrun` gets what the server sends; `onresume` follows a pause. */
export function follow({ run, onrun, onresume }) {
  let source = null;
  let retry = null;
  let missed = false;

  function open() {
    if (document.hidden || source) return;
    showConnection("connecting");
    source = new EventSource(url("live", { run }));
    source.addEventListener("run", (event) => onrun(JSON.parse(event.data)));
    source.onopen = () => {
      showConnection("open");
      if (missed) onresume();
      missed = false;
    };
    source.onerror = () => {
      missed = true;
      showConnection("lost");
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      close();
      retry = setTimeout(open, RETRY_MS);
    };
  }

  function close() {
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      missed = true;
      close();
      showConnection("paused");
    } else open();
  });
  addEventListener("pagehide", close);
  open();
}

/**
 * Call `work` at once, but no sooner than `ms` after it last began, nor than it has rested for as long as it took. The
 * last call is never lost, and there are never two at the same time.
 */
export function throttle(work, ms) {
  let next = -Infinity;
  let timer = null;
  let busy = false;
  let again = false;
  async function go() {
    const began = performance.now();
    timer = null;
    busy = true;
    again = false;
    try {
      await work();
    } finally {
      const ended = performance.now();
      next = Math.max(began + ms, 2 * ended - began);
      busy = false;
      if (again) request();
    }
  }
  function request() {
    if (busy) again = true;
    else timer ??= setTimeout(go, Math.max(0, next - performance.now()));
  }
  return request;
}
