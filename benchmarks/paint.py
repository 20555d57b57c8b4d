"""What somebody sees, and how soon: a long run opened in Chromium, and an attempt of a job that trains meanwhile.

    python benchmarks/paint.py [--attempts 1000000] [--tensors 300] [--repeats 10] [--live-s 40] [--keep DIR]

Each opening has a browser context of its own and a database that is out of the page cache; times count from the
beginning of the navigation until the verdict, the timeline and the heatmap stand there. A live attempt's time counts
from the end of its `scaler.update()` until a page that shows the run counts it; both by the clock of this machine.
"""

import argparse
import bisect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import queries
from playwright.sync_api import Browser, StorageState, sync_playwright
from rich.console import Console
from rich.table import Table

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings

CONSOLE = Console(width=110)
QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-sync", "--no-first-run")
SETTLING_S = 8.0  # the job learns that somebody watches
ATTEMPTS_PER_S = 10
SEEN = {  # what must stand there
    "verdict": "document.querySelector('#verdict .verdict-sentence')?.textContent",
    "timeline": "document.querySelector('#timeline-plot .main-svg .scatterlayer path')",
    "heatmap": "document.querySelector('#heatmap-plot .heatmaplayer image')",
}
PAINTED = f"""
window.seen = {{}};
const waiting = {{{", ".join(f"{name}: () => {there}" for name, there in SEEN.items())}}};
function look() {{
  for (const [name, there] of Object.entries(waiting))
    if (!(name in seen) && there()) requestAnimationFrame(() => {{ seen[name] ??= performance.now(); }});
  requestAnimationFrame(look);
}}
requestAnimationFrame(look);
"""
COUNTED = """
window.counted = [];
function look() {
  const now = Number(document.querySelector('#facts dd')?.firstChild?.textContent.replace(/\\D/g, ''));
  if (now && now !== counted.at(-1)?.[1]) counted.push([Date.now() / 1000, now]);
  requestAnimationFrame(look);
}
requestAnimationFrame(look);
"""


def opened(
    browser: Browser, session: StorageState, server: queries.Server, database: Path
) -> dict[str, float]:
    """Milliseconds until each of `SEEN` stands there, in a browser that has seen nothing yet."""
    queries.drop_from_cache(database)
    context = browser.new_context(viewport={"width": 1360, "height": 1000}, storage_state=session)
    page = context.new_page()
    page.add_init_script(PAINTED)
    page.goto(f"http://{server.url}/run/run")
    seen: dict[str, float] = {}
    while len(seen) < len(SEEN):
        page.wait_for_timeout(
            100
        )  # the page's policy forbids the evaluation that waiting for a function takes
        seen = page.evaluate("seen")
    context.close()
    return seen


def live(browser: Browser, session: StorageState, server: queries.Server, seconds: float) -> list[float]:
    """Seconds from each attempt of a job to its count on a page."""
    run = f"live-{time.time():.0f}"
    environ = os.environ | {"AMPWATCH_SERVER": f"http://{server.url}", "AMPWATCH_TOKEN": server.token}
    with tempfile.TemporaryDirectory() as folder:
        environ |= {"AMPWATCH_RUN": run, "AMPWATCH_DIR": folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--train", str(seconds + SETTLING_S)]
        job = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        with server.client() as client:
            while client.get(f"/v1/runs/{run}").status_code != 200:
                time.sleep(0.2)
        context = browser.new_context(viewport={"width": 1360, "height": 1000}, storage_state=session)
        page = context.new_page()
        page.add_init_script(COUNTED)
        page.goto(f"http://{server.url}/run/{run}")
        settled = time.time() + SETTLING_S
        ended = json.loads(job.communicate()[0])
        page.wait_for_timeout(SETTLING_S * 1000)
        counted = page.evaluate("counted")
        context.close()
    known = [attempts for _, attempts in counted]
    steady = [i for i, end in enumerate(ended) if end > settled]
    return [counted[bisect.bisect_left(known, i + 1)][0] - ended[i] for i in steady]


def train(seconds: float) -> None:
    """A small job that says when each of its attempts ended."""
    import torch
    from torch.nn import functional as F

    import ampwatch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = ampwatch.GradScaler("cpu", model=model, init_scale=1024.0)
    ended: list[float] = []
    started = time.monotonic()
    for step in range(int(seconds * ATTEMPTS_PER_S)):
        time.sleep(max(0.0, started + step / ATTEMPTS_PER_S - time.monotonic()))
        x = torch.randn(16, 64)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        scaler.scale(F.mse_loss(output.float(), x[:, :1])).backward()
        scaler.step(optimizer)
        scaler.update()
        ended.append(time.time())
    print(json.dumps(ended), flush=True)


def quantiles(values: list[float]) -> list[str]:
    cuts = statistics.quantiles(values, n=20)
    return [f"{statistics.median(values):.2f}", f"{cuts[-1]:.2f}", f"{max(values):.2f}"]


def measure(database: Path, repeats: int, live_s: float) -> Table:
    shown = Table("s", "p50", "p95", "most")
    server = queries.Server(database)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        first = browser.new_context()
        first.new_page().goto(server.link)
        session = first.storage_state()
        first.close()
        times = [opened(browser, session, server, database) for _ in range(repeats)]
        for name in SEEN:
            shown.add_row(f"cold until the {name} is there", *quantiles([t[name] / 1000 for t in times]))
        shown.add_row("an attempt until it is counted", *quantiles(live(browser, session, server, live_s)))
        browser.close()
    server.stop()
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--live-s", type=float, default=40.0)
    parser.add_argument(
        "--keep", type=Path, help="folder to build in, and to read from where it was built before"
    )
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        database = (given.keep or Path(folder)) / str(given.attempts) / "ampwatch.db"
        if not database.exists():
            database.parent.mkdir(parents=True)
            service = Service(Settings(str(database)), Diagnosis)
            queries.build(service, given.attempts, given.tensors)
            service.database.close()
        CONSOLE.print(f"{given.attempts:,} attempts, {given.tensors} tensors")
        CONSOLE.print(measure(database, given.repeats, given.live_s))


if __name__ == "__main__":
    main()
