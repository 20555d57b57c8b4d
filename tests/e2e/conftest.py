"""A real Chromium on a real server: every page must leave no error, break no policy and ask no other host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from ampwatch_server.serve import Running, running

sys.path.insert(0, str(Path(__file__).parent))  # what the tests here share

import recorded_runs
from pages import PATIENCE_MS, Watch, post

QUIET = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


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
