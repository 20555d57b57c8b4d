"""`ampwatch runs`: what a folder of recorded runs holds."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from ampwatch import spool
from ampwatch.records import Table

from ._json import as_json
from ._places import RECORDED, tell_damaged

_YEAR_9999 = 253e9  # Unix time, s: the last year that a date can have


@dataclass
class _Tally:
    """What the attempts of one rank add up to; every rank makes the same ones."""

    attempts: int = 0
    skipped: int = 0
    scale: float | None = None
    last: float = -math.inf  # s, Unix time of the attempt that left the scale

    def add(self, table: Table) -> None:
        """Take attempts in. Those of a run that was resumed come one process after the other, in no order."""
        if not len(table["attempt"]):
            return
        self.attempts += len(table["attempt"])
        self.skipped += int(table["found_inf"].sum()) if "found_inf" in table else 0
        last = float(table["time"][-1]) if "time" in table else self.last
        if self.scale is None or last >= self.last:
            self.scale, self.last = float(table.get("scale_after", table["scale"])[-1]), last


def runs(
    directory: Annotated[Path, typer.Argument(help="Folder of recorded runs.")] = RECORDED,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List recorded runs with their attempts, skips, last scale and verdict."""
    directories = spool.run_directories(directory)
    tell_damaged(directory)
    rows = [_row(run, path) for run, path in directories.items()]
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
    begun: list[float] = []
    by_rank: defaultdict[int, _Tally] = defaultdict(_Tally)
    for batch in spool.read(path):
        diagnosis.add(batch)
        if batch.kind == "attempts":
            by_rank[batch.rank].add(batch.table())
        elif batch.kind == "events":
            begun += [
                event.time for event in batch.events() if event.type == "run" and 0 < event.time < _YEAR_9999
            ]
    first = by_rank[min(by_rank, default=0)]
    counts = {"attempts": first.attempts, "skipped": first.skipped, "scale": first.scale}
    return {
        "run": run,
        "started": min(begun, default=None),
        **counts,
        "verdict": diagnosis.verdict().as_dict(),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    from ampwatch.diagnosis.texts import power

    verdict = row["verdict"]
    return (
        row["run"],
        ""
        if row["started"] is None
        else f"{datetime.fromtimestamp(row['started'], timezone.utc):%Y-%m-%d %H:%M}",
        f"{row['attempts']:,}",
        f"{row['skipped']:,}",
        "" if row["scale"] is None else power(row["scale"]),
        ": ".join(filter(None, (verdict["word"], verdict["kind"]))),
    )
