"""`ampwatch runs`: what a folder of recorded runs holds."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from ampwatch import spool

from ._json import as_json


def runs(
    directory: Annotated[Path, typer.Argument(help="Folder of recorded runs.")] = Path("ampwatch_runs"),
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List recorded runs with their attempts, skips, last scale and verdict."""
    rows = [_row(run, path) for run, path in spool.run_directories(directory).items()]
    if json_:
        typer.echo(as_json({"runs": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for heading in ("run", "started (UTC)", "attempts", "skipped", "scale"):
        table.add_column(heading, no_wrap=True)
    table.add_column("verdict")
    for row in rows:
        table.add_row(*_cells(row))
    Console().print(table)


def _row(run: str, path: Path) -> dict[str, Any]:
    from ampwatch.diagnosis.engine import Diagnosis

    diagnosis = Diagnosis()
    row: dict[str, Any] = {"run": run, "started": None, "attempts": 0, "skipped": 0, "scale": None}
    for batch in spool.read(path):
        diagnosis.add(batch)
        if batch.kind == "attempts":
            table = batch.table()
            row["attempts"] += len(table["attempt"])
            row["skipped"] += int(table["found_inf"].sum()) if "found_inf" in table else 0
            row["scale"] = float(table.get("scale_after", table["scale"])[-1])
        elif batch.kind == "events":
            started = [event.time for event in batch.events() if event.type == "run"]
            row["started"] = min([row["started"] or float("inf"), *started])
    return row | {"verdict": diagnosis.verdict().as_dict()}


def _cells(row: dict[str, Any]) -> list[str]:
    from rich.markup import escape

    started = (
        datetime.fromtimestamp(row["started"], timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        if row["started"]
        else ""
    )
    verdict = row["verdict"]
    scale = "" if row["scale"] is None else f"{row['scale']:g}"
    counts = [f"{row['attempts']:,}", f"{row['skipped']:,}"]
    return [escape(row["run"]), started, *counts, scale, escape(verdict["sentence"])]
