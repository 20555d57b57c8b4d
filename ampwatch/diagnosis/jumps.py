"""A true norm that is the loss scale itself times what it was: the scale was put in, or taken out, once too often."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .moments import Moment, moment_of
from .rows import Rows

LEAST_SCALE: Final = 128.0  # below it a jump of that size may have another reason
KEPT, ENOUGH = 16, 8  # norms before the jump, and how many of them are wanted
LASTING: Final = 5  # attempts
NEAR: Final = 2.0  # a factor, of the first attempt; twice that of those behind
NOISE: Final = 4.0  # a factor that norms before may vary by, and a first one that is smaller with them
STEEP: Final = LEAST_SCALE / NOISE**2  # from one attempt to the next, below which nothing needs a closer look


class Jumped(NamedTuple):
    """Norms that are S times, or 1/S of, what they were."""

    since: Moment
    way: Literal["times", "by"]
    scale: float
    ratio: float


@dataclass(slots=True)
class Jump:
    """Looks for one in the steps taken by a stream."""

    before: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))  # norm, loss
    pending: Jumped | None = None
    usual: tuple[float, float] = (0.0, 0.0)
    count: int = 0
    found: Jumped | None = None

    def fold(self, taken: Rows) -> None:
        """Take in steps that were taken, in order."""
        if self.found is not None:
            return
        rows = taken[np.isfinite(taken["norm"]) & (taken["norm"] > 0) & np.isfinite(taken["scale"])]
        steep = self._steep(rows) if len(rows) else np.zeros(0, np.int64)
        place = 0
        while place < len(rows) and self.found is None:
            if self.pending is None:  # straight to where one may begin
                start = int(np.append(steep, len(rows))[np.searchsorted(steep, place)])
                level = rows[max(place, start - KEPT) : start]
                self.before.extend(zip(level["norm"].tolist(), level["loss"].tolist(), strict=True))
                place = start
            if place < len(rows):
                self._add(rows[place])
                place += 1

    def _steep(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Places of the norms that are far from the one before."""
        last = self.before[-1][0] if self.before else float(rows["norm"][0])
        with np.errstate(all="ignore"):
            ratios = rows["norm"] / np.append(last, rows["norm"][:-1])
            return np.flatnonzero(np.maximum(ratios, 1 / ratios) >= STEEP)

    def _add(self, row: Any) -> None:
        if self.pending is None and len(self.before) >= ENOUGH:
            self.usual = median(n for n, _ in self.before), median(x for _, x in self.before)
            self.pending, self.count = self._jump(row, NEAR, self._noise), 0
        if self.pending is not None:
            self._follow(row, self.pending)
        if self.pending is None:
            self.before.append((float(row["norm"]), float(row["loss"])))

    def _follow(self, row: Any, pending: Jumped) -> None:
        now = self._jump(row, NEAR**2, NEAR * self._noise)
        if now is None or now.way != pending.way:
            self.pending = None
            return
        self.count += 1
        if self.count >= LASTING:
            self.found = pending

    @property
    def _noise(self) -> float:
        """The factor by which norms before were off the usual one, within bounds: a first small one may be as well."""
        norms, usual = [n for n, _ in self.before], self.usual[0]
        return min(max(NEAR, max(norms) / usual, usual / min(norms)), NOISE)

    def _jump(self, row: Any, near: float, noise: float) -> Jumped | None:
        """Larger by S as the loss is; or smaller by S, whatever the loss is."""
        scale, ratio = float(row["scale"]), float(row["norm"]) / self.usual[0]
        if scale < LEAST_SCALE:
            return None
        loss, expected = float(row["loss"]), self.usual[1] * scale
        if 1 / near <= ratio / scale <= near and expected and 1 / near <= loss / expected <= near:
            return Jumped(moment_of(row), "times", scale, ratio)
        return Jumped(moment_of(row), "by", scale, ratio) if 1 / noise <= ratio * scale <= noise else None
