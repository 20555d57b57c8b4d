"""The main job as a person does it: type the command, open the link, go from the runs to a run to its finding."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pages import PATIENCE_MS, Watch
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

MODULE = "blocks.1.attention"


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The link that `ampwatch demo` prints once it serves; it then ends by Ctrl-C, without an error."""
    folder = str(tmp_path_factory.mktemp("walk"))
    command = [
        sys.executable,
        "-u",
        "-m",
        "ampwatch",
        "demo",
        "--steps",
        "80",
        "--seed",
        "5",
        "--dir",
        folder,
    ]
    with (
        Path(folder, "stderr").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as demo,
    ):
        said = iter(demo.stdout)
        assert any("Serving until Ctrl-C" in line for line in said)
        yield next(said).strip()
        demo.send_signal(signal.SIGINT)
        assert demo.stdout.read().endswith("Stopped.\n")
    assert (demo.returncode, Path(folder, "stderr").read_text()) == (0, "")


@pytest.fixture(scope="module")
def page(browser: Browser, link: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    watch = Watch(page, link)
    page.goto(link)
    yield page
    page.close()
    assert watch.faults == []


def test_the_runs_their_verdicts_and_the_finding_of_the_one_that_fails(page: Page) -> None:
    for run, word in (("demo-1", "Healthy"), ("demo-2", "Failing"), ("demo-3", "Warning")):
        expect(page.get_by_role("row").filter(has_text=run)).to_contain_text(word)
    page.get_by_role("link", name="demo-2").click()
    expect(page.locator("#verdict")).to_contain_text(f"{MODULE} exceed float16")
    finding = page.locator(".finding").first
    expect(finding).to_contain_text("forward overflow")
    expect(finding).to_contain_text("float32")
    page.wait_for_selector("#timeline-plot .main-svg")
    finding.get_by_role("link").first.click()
    expect(page).to_have_url(re.compile("finding="))


def test_the_documentation_of_the_api_needs_no_other_host(page: Page) -> None:
    parts = urlsplit(page.url)
    page.goto(f"{parts.scheme}://{parts.netloc}/docs")
    expect(page.get_by_text("/v1/batches").first).to_be_visible()
