"""Make the pictures in docs/images from `ampwatch demo`.

    python docs/screenshots.py [DIR]

Trains the three runs of the demo into DIR (a temporary folder by default; one that holds a demo already is used as
it is), serves their records, and photographs the list of runs and the failing run. Needs a Chromium on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import BrowserContext, sync_playwright

from ampwatch_server.serve import running

IMAGES = Path(__file__).parent / "images"
QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-sync", "--no-first-run")
SIZE = {"width": 1360, "height": 1000}
RUNS = 3


def main(directory: Path) -> None:
    """Train if nothing is there, serve, photograph."""
    if not (directory / "runs").exists():
        command = [sys.executable, "-m", "ampwatch", "demo", "--exit", "--dir", str(directory)]
        subprocess.run(command, check=True)
    IMAGES.mkdir(exist_ok=True)
    database = f"sqlite:///{directory / 'screenshots.db'}"
    with running(database=database, directory=directory / "runs") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        for theme in ("light", "dark"):
            context = browser.new_context(viewport=SIZE, color_scheme=theme, device_scale_factor=1.5)
            if theme == "light":
                context.new_page().goto(server.link)
                session = context.storage_state()
            else:
                context.add_cookies(session["cookies"])
            photograph(context, server.url, theme)
        browser.close()


def photograph(context: BrowserContext, url: str, theme: str) -> None:
    """The list of runs, and the run that fails, once all of it is there."""
    page = context.new_page()
    page.goto(url)
    rows = page.locator("tbody tr")
    rows.nth(RUNS - 1).wait_for()
    failing = rows.filter(has_text="Failing")
    failing.first.wait_for()
    page.locator(".badge[data-word='no data']").first.wait_for(state="detached")
    page.screenshot(path=IMAGES / f"runs-{theme}.png", clip={"x": 0, "y": 0, "width": 1360, "height": 640})
    failing.get_by_role("link").first.click()
    page.wait_for_selector("#heatmap-plot .main-svg")
    page.screenshot(path=IMAGES / f"run-{theme}.png")
    page.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch).absolute())
