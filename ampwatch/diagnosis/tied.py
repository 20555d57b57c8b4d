"""A loss that falls with the loss scale while no step is taken: it was multiplied by the scale before scale() did so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from .moments import Moment, moment_of
from .rows import Rows, runs_of

LEAST: Final = 6  # attempts
DEEP: Final = 32.0  # a factor by which the scale falls in them
NEAR: Final = 2.0  # a factor within which all losses over their scales stay, as batches differ


class Descent(NamedTuple):
    """From a loss at a scale to a loss at a scale, through so many skipped attempts."""

    since: Moment
    attempts: int
    loss: float
    scale: float
    loss_last: float = 0.0
    scale_last: float = 0.0


@dataclass(slots=True)
class Tied:
    """Looks for it among skipped attempts in a row: the weights stay what they are, and so should the loss."""

    begun: Descent | None = None
    low: float = 0.0  # loss over scale
    high: float = 0.0
    found: Descent | None = None

    def fold(self, rows: Rows) -> None:
        """Take in attempts, in order."""
        if self.found is not None:
            return
        finite = np.isfinite(rows["loss"]) & np.isfinite(rows["scale"])
        still = rows["skipped"] & ((rows["stepped"] & ~rows["skips"]) == 0)  # nor did another optimizer step
        tells = still & finite & (rows["loss"] > 0) & (rows["scale"] > 0) & ~rows["penalised"]
        for start, stop in runs_of(tells):
            if tells[start]:
                for row in rows[start:stop]:
                    self._add(row)
            else:
                self.end()

    def end(self) -> None:
        """What comes next is not of the same run."""
        self.begun = None

    def _add(self, row: Any) -> None:
        loss, scale = float(row["loss"]), float(row["scale"])
        low, high = min(self.low, loss / scale), max(self.high, loss / scale)
        if self.begun is None or high > NEAR * low:
            self.begun = Descent(moment_of(row), 0, loss, scale)
            low = high = loss / scale
        self.low, self.high = low, high
        attempts = self.begun.attempts + 1
        self.begun = self.begun._replace(attempts=attempts, loss_last=loss, scale_last=scale)
        if self.found is None and attempts >= LEAST and self.begun.scale >= DEEP * scale:
            self.found = self.begun
