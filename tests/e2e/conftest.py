"""A real Chromium on a real server: every page must leave no error, break no policy and ask no other host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from ampwatch.records import Batch, to_bytes
from ampwatch_server.serve import Running, running

sys.path.insert(0, str(Path(__file__).parent))  # recorded_runs.py, which the tests here share

import recorded_runs

QUIET = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE_MS = 60_000  # two cores, shared

# Runs in the page before its own scripts: what the policy blocked, for `Watch` to read.
NOTE_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} blocked ${event.blockedURI}`));
"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        missing = "no chromium on the PATH: browser tests did not run"
        (pytest.fail if os.environ.get("AMPWATCH_REQUIRE_BROWSER") == "1" else pytest.skip)(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    database = tmp_path_factory.mktemp("server") / "ampwatch.db"
    with running(database=f"sqlite:///{database}") as server:
        for run in (recorded_runs.healthy(), recorded_runs.failing()):
            post(server, run)
        yield server


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


@pytest.fixture(scope="session")
def signed_in(browser: Browser, server: Running) -> Iterator[BrowserContext]:
    """A browser that has opened the one-time link."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(server.link)
    page.close()
    yield context
    context.close()


@pytest.fixture
def page(signed_in: BrowserContext, server: Running) -> Iterator[Page]:
    page = signed_in.new_page()
    watch = Watch(page, server.url)
    yield page
    page.close()
    assert watch.faults == []
