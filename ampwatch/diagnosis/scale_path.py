"""The path of the scale of one stream over its clean attempts: growths, the highest of late, and what lies below 1."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from .moments import Moment, moment_of
from .rows import Rows, runs_of
from .trends import RECENT

DEFAULT_INTERVAL: Final = 2000
HALF: Final = (0.4, 0.62)  # of the norm before


@dataclass(slots=True)
class ScalePath:
    """What the scale did while steps were taken.

    Arguments:
        interval: the scaler's growth interval, in attempts.
    """

    interval: int = DEFAULT_INTERVAL
    growths: int = 0
    growths_since_skip: int = 0
    first_growth: Moment | None = None
    halved: int = 0  # growths whose norm is half of those before …
    whole: int = 0  # … and those whose norm is not
    first_halved: Moment | None = None
    below_one: int = 0  # steps taken at a scale below 1, since it last stood at 1 or above
    below_since: Moment | None = None
    loss_below: float = math.nan  # the first loss there
    clean: deque[tuple[float, int]] = field(default_factory=deque)  # scale, last attempt at it

    def fold(self, rows: Rows, norms_before: npt.NDArray[np.float64]) -> None:
        """Take in clean attempts.

        Arguments:
            norms_before: of the newest 64 attempts before them at most, in order.
        """
        self._note_below_one(rows)
        grew = np.flatnonzero(rows["scale_after"] > rows["scale"])
        self.growths += len(grew)
        self.growths_since_skip += len(grew)
        if len(grew):
            self._note_halvings(rows, grew, norms_before)
            self.first_growth = self.first_growth or moment_of(rows[grew[0]])
        for start, stop in runs_of(rows["scale"]):
            scale, last = float(rows["scale"][start]), int(rows["attempt"][stop - 1])
            if self.clean and self.clean[-1][0] == scale:
                self.clean.pop()
            self.clean.append((scale, last))
        self._forget(int(rows["attempt"][-1]))

    def highest_clean(self, now: int) -> float:
        """The highest clean scale of the last 2 growth intervals; 0 without one."""
        self._forget(now)
        return max((scale for scale, _ in self.clean), default=0.0)

    def _note_halvings(
        self, rows: Rows, grew: npt.NDArray[np.int64], norms_before: npt.NDArray[np.float64]
    ) -> None:
        """Whether the gradients of growths were divided by the grown scale."""
        norms = np.concatenate([norms_before, rows["norm"]])
        for i in grew.tolist():
            before = norms[: len(norms_before) + i][-RECENT:]
            usual = before[np.isfinite(before)][-8:]
            if len(usual) and rows["norm"][i] > 0:
                halved = bool(HALF[0] < rows["norm"][i] / median(usual.tolist()) < HALF[1])
                self.halved, self.whole = self.halved + halved, self.whole + (not halved)
                if halved:
                    self.first_halved = self.first_halved or moment_of(rows[i])

    def _forget(self, now: int) -> None:
        while self.clean and self.clean[0][1] < now - 2 * self.interval:
            self.clean.popleft()

    def _note_below_one(self, rows: Rows) -> None:
        above = np.flatnonzero(rows["scale"] >= 1)
        if len(above):
            self.below_one, self.below_since, self.loss_below = 0, None, math.nan
            rows = rows[above[-1] + 1 :]
        if not len(rows):
            return
        if self.below_since is None:
            self.below_since, self.loss_below = moment_of(rows[0]), float(rows["loss"][0])
        self.below_one += int(rows["taken"].sum())
