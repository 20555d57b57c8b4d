"""Where commands look for recorded runs when no folder is named."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from ampwatch import spool

RECORDED: Final = Path("ampwatch_runs")  # where a training job records with nothing configured


def recorded_here() -> Path | None:
    """That folder, where the working directory has one."""
    return RECORDED if RECORDED.is_dir() else None


def tell_damaged(directory: Path) -> None:
    """A line on stderr for each file below a folder of runs that cannot be read to its end."""
    for path, offset in spool.damaged(directory).items():
        typer.echo(f"ampwatch: {path} is damaged: nothing is read from its byte {offset:,} on", err=True)
