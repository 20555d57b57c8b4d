"""Where commands look for recorded runs when no folder is named."""

from __future__ import annotations

from pathlib import Path
from typing import Final

RECORDED: Final = Path("ampwatch_runs")  # where a training job records with nothing configured


def recorded_here() -> Path | None:
    """That folder, where the working directory has one."""
    return RECORDED if RECORDED.is_dir() else None
