"""`ampwatch demo`: three float16 training runs, a server, and what the records say of each."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ampwatch.errors import AmpwatchError, MissingExtra
from ampwatch.settings import Settings

if TYPE_CHECKING:
    from ampwatch.demo.train import Plan
    from ampwatch_server.serve import Running

MARKS = {"healthy": "[green]✓[/]", "warning": "[yellow]![/]", "failing": "[red]✗[/]", "no data": "?"}
CAPTIONS = ("healthy", "an attention layer overflows", "a loss scale fixed too low")
TOO_LOW = 2.0**-10


def demo(
    steps: Annotated[int, typer.Option(min=60, help="Training steps of each run.")] = 400,
    seed: Annotated[
        int | None, typer.Option(help="Draws weights, batches and the step of the overflow.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep the records here instead of in a temporary folder.")
    ] = None,
    exit_: Annotated[
        bool, typer.Option("--exit", help="End after the verdicts instead of serving on.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Train a small transformer three times, healthy and with two faults, and diagnose each run."""
    running, train, device = _imports()
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    plans = draw(steps, seed)
    console = Console(stderr=json_)
    directory = directory or Path(tempfile.mkdtemp(prefix="ampwatch-demo-"))
    with running(database=f"sqlite:///{directory / 'demo.db'}") as server:
        console.print(
            f"The dashboard, live while the runs train (the link signs one browser in):\n{server.link}\n",
            soft_wrap=True,
        )
        with _bars(console) as progress:
            rows = [
                _one(plan, caption, progress, train, server, directory / "runs", device)
                for plan, caption in zip(plans, CAPTIONS, strict=True)
            ]
        if json_:
            answer = {
                "url": server.url,
                "dir": str(directory),
                "seed": seed,
                "overflow_at": plans[1].overflow_at,
            }
            typer.echo(json.dumps(answer | {"runs": rows}, indent=2))
        else:
            _print_verdicts(console, rows, directory)
        if not exit_:
            _serve_on(console, server)


def draw(steps: int, seed: int) -> list[Plan]:
    """The three plans; the step at which the attention breaks is drawn from the middle half of the run."""
    from ampwatch.demo.train import Plan

    overflow_at = random.Random(seed).randrange(steps // 4, steps * 3 // 4)
    return [
        Plan("demo-1", steps, seed),
        Plan("demo-2", steps, seed, overflow_at=overflow_at),
        Plan("demo-3", steps, seed, init_scale=TOO_LOW, fixed=True),
    ]


def _imports() -> tuple[Any, Any, str]:
    try:
        import torch

        from ampwatch.demo.train import train
    except ModuleNotFoundError as error:
        raise MissingExtra("ampwatch demo", "torch,server") from error
    try:
        from ampwatch_server.serve import running
    except ModuleNotFoundError as error:
        raise MissingExtra("ampwatch demo", "torch,server") from error
    if torch.cuda.is_available():
        return running, train, "cuda"
    torch.set_num_threads(1)  # the model is too small to share; more threads only wait for one another
    return running, train, "cpu"


def _one(
    plan: Plan,
    caption: str,
    progress: Progress,
    train: Callable[..., None],
    server: Running,
    directory: Path,
    device: str,
) -> dict[str, Any]:
    from ampwatch import finish

    progress.console.print(f"{plan.name}: {caption}")
    task = progress.add_task(plan.name, total=plan.steps, loss="", scale="", skips="")
    started = time.monotonic()
    train(
        plan,
        progress=lambda *numbers: _show(progress, task, *numbers),
        device=device,
        settings=Settings.load(
            run=plan.name, project="demo", server=server.url, token=server.token, dir=directory, quiet=True
        ),
    )
    finish()
    return {
        "run": plan.name,
        "name": plan.name,
        "seconds": round(time.monotonic() - started, 1),
        **_findings(server, plan.name),
    }


def _show(progress: Progress, task: TaskID, done: int, loss: float, scale: float, skipped: int) -> None:
    from ampwatch.diagnosis.texts import power

    progress.update(task, completed=done, loss=f"{loss:.3f}", scale=power(scale), skips=str(skipped))


def _findings(server: Running, run: str) -> dict[str, Any]:
    """What the server says of the run once it has stored the last batch."""
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}) as client:
        for _ in range(100):
            stored = client.get(f"/v1/runs/{run}")
            if stored.is_success and stored.json()["status"] == "finished":
                answer: dict[str, Any] = client.get(f"/v1/runs/{run}/findings").raise_for_status().json()
                return answer
            time.sleep(0.1)
    raise AmpwatchError(f"the server has not stored the end of {run} within 10 s: {stored.text}")


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:>4}/{task.total}"),
        TextColumn("loss {task.fields[loss]:>5}"),
        TextColumn("scale {task.fields[scale]:>5}"),
        TextColumn("skipped {task.fields[skips]:>3}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _print_verdicts(console: Console, rows: list[dict[str, Any]], directory: Path) -> None:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        verdict = row["verdict"]
        table.add_row(MARKS[verdict["word"]], Text(row["run"], "bold"), Text(verdict["sentence"]))
    console.print()
    console.print(table)
    console.print("\nThe same from the records alone:")
    again = f"{_typed()} diagnose {shlex.quote(str(directory / 'runs'))}"
    console.print(f"[bold]{again}[/]", soft_wrap=True, highlight=False)


def _typed() -> str:
    """What to type for this program: where it was installed it may not be on the PATH."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return "python -m ampwatch"
    return program.name if shutil.which(program.name) == str(program) else str(program)


def _serve_on(console: Console, server: Running) -> None:
    """Show the dashboard's link, and the next one when a browser has opened it, until Ctrl-C."""
    console.print("\nServing until Ctrl-C. The dashboard:")
    try:
        while True:
            server.renewed.clear()
            console.print(f"[bold]{server.link}[/]", soft_wrap=True, highlight=False)
            server.renewed.wait()
            console.print("That link has been opened; for another browser:")
    except KeyboardInterrupt:
        console.print("Stopped.")
