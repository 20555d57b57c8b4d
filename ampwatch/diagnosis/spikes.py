"""Losses that stand out by themselves, whose steps were taken, and that come back: the spikes that skip nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .moments import Moment, moment_of
from .rows import Rows

FROM: Final = 16  # losses before it, at least
FAR: Final = (
    4.0  # × the largest of the 64 losses before, as the flight recorder has it (docs/architecture.md)
)
BACK: Final = 2.0  # × it, below which the loss has come back
LONGEST: Final = 8  # attempts; a loss that stays longer is at a new level


class Spike(NamedTuple):
    """A loss far above the 64 before it, and the attempt at which it was back; None as long as it is not."""

    at: Moment
    loss: float
    usual: float
    over: Moment | None = None

    @property
    def ratio(self) -> float:
        """How far above."""
        return self.loss / self.usual


@dataclass(slots=True)
class Spikes:
    """Looks for them in the clean attempts of a stream."""

    count: int = 0
    first: Spike | None = None
    newest: Spike | None = None
    pending: Spike | None = None
    seen: int = field(default=0, repr=False)  # attempts since `pending` began

    def fold(self, rows: Rows, before: npt.NDArray[np.float64]) -> None:
        """Take in clean attempts.

        Arguments:
            before: the newest 64 losses before them, in order, NaN where there is none.
        """
        losses = np.concatenate([before, rows["loss"]])
        with np.errstate(invalid="ignore", over="ignore"):
            steep = np.flatnonzero(losses[1:] > FAR * np.abs(losses[:-1])) + 1 - len(before)
        place = 0
        while place < len(rows):
            if self.pending is None:  # straight to where one may begin
                place = int(np.append(steep, len(rows))[np.searchsorted(steep, place)])
                if place < len(rows):
                    self._begin(rows[place], losses[: len(before) + place])
            else:
                self._follow(rows[place], self.pending)
            place += 1

    def cut(self) -> None:
        """Attempts were lost here: whether the loss came back in them is not known."""
        self.pending = None

    def _begin(self, row: Any, before: npt.NDArray[np.float64]) -> None:
        known = before[-64:]
        known = known[np.isfinite(known)]
        usual = float(known.max(initial=0.0))
        if len(known) >= FROM and float(row["loss"]) >= FAR * usual > 0:
            self.pending, self.seen = Spike(moment_of(row), float(row["loss"]), usual), 1

    def _follow(self, row: Any, pending: Spike) -> None:
        self.seen += 1
        loss = float(row["loss"])
        if loss < BACK * pending.usual:
            self.newest = pending._replace(over=moment_of(row))
            self.first = self.first or self.newest
            self.count += 1
            self.pending = None
        elif self.seen > LONGEST:
            self.pending = None
        elif loss > pending.loss:
            self.pending = pending._replace(loss=loss)
