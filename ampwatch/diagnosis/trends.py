"""Loss and true norm of the newest attempts, and whether the two grow together.

The last 64 attempts are kept one by one, older ones in a sketch that answers percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .moments import Moment
from .rows import runs_of
from .sketch import Sketch

RECENT: Final = 64  # attempts whose loss and norm are kept one by one
PAST: Final = 4.0  # × the own 99th percentile
LEAPS: Final = 3  # changes of the weights in a row, each of which …
LEAP: Final = 1.75  # … makes the loss so many times larger, and all of them together …
LEAPT: Final = 8.0  # … so many times
HURLS: Final = 2  # changes of the weights in a row that may be all, if they make the loss …
HURLED: Final = 1e3  # … so many times larger, and it …
STAYS: Final = 3  # … stays there for so many attempts, each with another batch
ESTABLISHED: Final = 24  # attempts, and steps, by which a stream has percentiles of its own to leap from
THROWN: Final = 100.0  # × the first losses, where a stream has none and the loss stays


class Depth(NamedTuple):
    """A loss scale at which gradients overflowed, and the highest that was clean of late; 0 where none was."""

    scale: float
    high: float

    @property
    def is_far(self) -> bool:
        """Whether gradients must have grown past 4 × what they were, whatever the last norm that could be taken was."""
        return self.scale < self.high / PAST


class Trend(NamedTuple):
    """Loss and true norm that grew past 4 × their own 99th percentile: since when, from what, to what.

    Of a young stream the percentiles are the largest of its first values. `depth` stands for a norm that could not be
    taken, since the gradients overflowed.
    """

    onset: Moment
    seen: Moment
    loss: float
    loss_p99: float
    norm: float
    norm_p99: float
    depth: Depth | None = None
    is_young: bool = False


@dataclass(slots=True)
class Recent:
    """Loss and true norm of the newest attempts of a stream, and what they stood at before."""

    newest: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 4)))
    """(at most 64, 4): attempt, step, loss, norm."""
    losses: Sketch = field(default_factory=Sketch)
    norms: Sketch = field(default_factory=Sketch)

    def add(self, seen: npt.NDArray[np.float64]) -> None:
        """Take attempts in, (n, 4) as `newest`."""
        known = np.concatenate([self.newest, seen])
        old, self.newest = known[:-RECENT], known[-RECENT:]
        if len(old):
            self.losses.add(old[:, 2])
            self.norms.add(old[:, 3])

    def finite_losses(self) -> npt.NDArray[np.float64]:
        """The newest attempts with a finite loss, (n, 4)."""
        return _finite(self.newest, 2)

    def loss(self) -> float:
        """Median of the 8 newest finite losses; NaN without any."""
        losses = self.finite_losses()[-8:, 2]
        return median(losses.tolist()) if len(losses) else float("nan")

    def baseline(self) -> tuple[float, float]:
        """99th percentiles of loss and norm, the newest attempts left out so that a trend is not its own past."""
        before = self.newest[: max(len(self.newest) // 2, 1)]
        return self.losses.percentile(99, before[:, 2]), self.norms.percentile(99, before[:, 3])

    def trend(self) -> Trend | None:
        """A divergence under way: both have risen through all thirds of the last 24, and past 4 × the percentile."""
        loss, norm = (_risen(_finite(self.newest, column)[-24:, column]) for column in (2, 3))
        if not (loss and norm):  # mostly so, and percentiles cost more
            return None
        return _trend_of(self.newest, loss, norm, *self.baseline())

    def leaps(self, depth: Depth, *, broke: bool) -> Trend | None:
        """A divergence in a few steps, judged at a skip: the last 3 have made the loss 8 times larger, or 2 a thousand times.

        Attempts are taken together by step, as the weights stay what they are while attempts are skipped: one wild
        batch leaps once and is not there in the next.

        Arguments:
            broke: the loss is not finite now, which is a leap of its own.
        """
        loss, norms = _leapt(self.finite_losses(), LEAPS - broke), _finite(self.newest, 3)[:, 3]
        if not loss or not len(norms):
            return None
        return _trend_of(self.newest, loss, float(norms[-1]), *self.baseline(), depth=depth)

    def thrown(self, depth: Depth, *, broke: bool) -> Trend | None:
        """The same in the first steps of a stream: the loss stands 100 times above those before the last 3, or 8 times and breaks."""
        losses, norms = self.finite_losses(), _finite(self.newest, 3)[:, 3]
        steps = list(runs_of(losses[:, 1]))
        if len(steps) < 2 or not len(norms):
            return None
        start, stop = steps[-1]
        first = losses[: steps[max(len(steps) - LEAPS, 1)][0], 2].max()
        loss = float(np.median(losses[start:stop, 2]))
        if not (broke and loss >= LEAPT * first) and not (stop - start >= STAYS and loss >= THROWN * first):
            return None
        trend = _trend_of(self.newest, loss, float(norms[-1]), float(first), float(norms[0]), depth=depth)
        return trend and trend._replace(is_young=True)

    def settled(self, trend: Trend) -> bool:
        """Whether the loss has come back from a divergence: the last 8 stand below 2 × the percentile before it."""
        losses = self.finite_losses()[-8:]
        later = bool(len(losses)) and losses[0, 0] > trend.seen.attempt
        return later and bool(np.all(losses[:, 2] < 2 * trend.loss_p99))


def ratio_of(a: float, b: float) -> float:
    """The larger over the smaller; NaN unless both are positive."""
    return max(a / b, b / a) if a > 0 and b > 0 else math.nan


def _trend_of(
    recent: npt.NDArray[np.float64],
    loss: float,
    norm: float,
    loss_p99: float,
    norm_p99: float,
    depth: Depth | None = None,
) -> Trend | None:
    """Loss and norm that have risen past 4 × their 99th percentile; onset is when the loss last passed it."""
    grew = norm > PAST * norm_p99 > 0
    if not loss > PAST * loss_p99 > 0 or not (grew or (depth and depth.is_far)):
        return None
    losses = _finite(recent, 2)
    below = np.flatnonzero(losses[:, 2] <= loss_p99)
    onset = losses[min(below[-1] + 1, len(losses) - 1) if len(below) else 0]
    moment = Moment(int(onset[0]), int(onset[1]))
    return Trend(moment, moment, loss, loss_p99, norm, norm_p99, None if grew else depth)


def _risen(values: npt.NDArray[np.float64]) -> float:
    """The median of the last third if each third stands 1.25 × above the one before, else 0.

    A spike that falls again does not rise through all thirds, and a jump to a new level does not either.
    """
    count = len(values)
    if count < 3:
        return 0.0
    listed, cut = values.tolist(), count // 3
    first, second, third = (
        median(listed[:cut]),
        median(listed[cut : count - cut]),
        median(listed[count - cut :]),
    )
    return third if third > 1.25 * second > 1.25 * 1.25 * first > 0 else 0.0


def _leapt(recent: npt.NDArray[np.float64], leaps: int) -> float:
    """The median loss of the newest step if it and those of the steps before leapt one after another, else 0."""
    steps = list(runs_of(recent[:, 1]))[-LEAPS - 1 :]
    medians = [float(median(recent[a:b, 2].tolist())) for a, b in steps]
    if len(medians) > leaps and _rises(medians[-leaps - 1 :], LEAPT):
        return medians[-1]
    stays = len(medians) > HURLS and steps[-1][1] - steps[-1][0] >= STAYS
    return medians[-1] if stays and _rises(medians[-HURLS - 1 :], HURLED) else 0.0


def _rises(medians: Sequence[float], together: float) -> bool:
    each = all(after >= LEAP * before > 0 for before, after in pairwise(medians))
    return each and medians[-1] >= together * medians[0]


def _finite(recent: npt.NDArray[np.float64], column: int) -> npt.NDArray[np.float64]:
    return recent[np.isfinite(recent[:, column])]
