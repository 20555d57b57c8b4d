"""What a page must not do, and how what it shows gets to its server."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Page

from ampwatch.records import Batch, to_bytes
from ampwatch_server.serve import Running

PATIENCE_MS = 60_000  # two cores, shared

# Runs in the page before its own scripts: what the policy blocked, for `Watch` to read.
NOTE_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} blocked ${event.blockedURI}`));
"""


def post(server: Running, batches: Iterable[Batch]) -> None:
    headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/vnd.ampwatch.batch"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for batch in batches:
            client.post("/v1/batches", content=to_bytes(batch)).raise_for_status()


class Watch:
    """Notes what a page must not do."""

    def __init__(self, page: Page, own: str) -> None:
        self.faults: list[str] = []
        page.add_init_script(NOTE_VIOLATIONS)
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on("request", lambda request: self._asked(request.url, urlsplit(own).netloc))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning", "trace"):
            self.faults.append(f"{kind}: {text}")

    def _asked(self, url: str, own: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != own:
            self.faults.append(f"asked another host: {url}")
