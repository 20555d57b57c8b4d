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
    _print_table([_cells(row) for row in rows])


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as they need to be; the last one may run over the edge of a narrow terminal."""
    table = [("run", "started (UTC)", "attempts", "skipped", "scale", "verdict"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


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
            begun = [event.time for event in batch.events() if event.type == "run"]
            row["started"] = min(filter(None, [row["started"], *begun]), default=None)
    return row | {"verdict": diagnosis.verdict().as_dict()}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    verdict = row["verdict"]
    return (
        row["run"],
        ""
        if row["started"] is None
        else f"{datetime.fromtimestamp(row['started'], timezone.utc):%Y-%m-%d %H:%M}",
        f"{row['attempts']:,}",
        f"{row['skipped']:,}",
        "" if row["scale"] is None else f"{row['scale']:g}",
        ": ".join(filter(None, (verdict["word"], verdict["kind"]))),
    )
