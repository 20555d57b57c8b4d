"""Gradients that are exactly zero, every element of every tensor: since when, in how many attempts in a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .moments import Moment, moment_of
from .rows import Rows


@dataclass(slots=True)
class Zeros:
    """The newest run of such attempts of one stream; attempts with inf or NaN neither belong to it nor end it."""

    since: Moment | None = None
    attempts: int = 0
    losses: int = 0  # of them whose loss is exactly zero too …
    others: int = 0  # … and whose loss is known not to be
    learned: bool = False  # whether any attempt had a gradient that is not zero

    def fold(self, rows: Rows) -> None:
        """Take in attempts without inf and NaN, in order."""
        zero = (rows["numel"] > 0) & (rows["n_zero"] == rows["numel"])
        other = np.flatnonzero(~zero)
        if len(other):
            self.learned = self.learned or bool((rows["numel"][other] > 0).any())
            self.since, self.attempts, self.losses, self.others = None, 0, 0, 0
            rows = rows[other[-1] + 1 :]
        if len(rows):
            self.since = self.since or moment_of(rows[0])
            self.attempts += len(rows)
            self.losses += int((rows["loss"] == 0).sum())
            self.others += int((np.abs(rows["loss"]) > 0).sum())
