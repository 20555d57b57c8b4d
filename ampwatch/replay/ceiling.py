"""The ceiling of each attempt: the largest loss scale at which it would not have overflowed (docs/numerics.md, section 6).

A clean attempt at scale S says that its ceiling is S or more, and, where its float16-born gradients bound it, at most
S × 65504 / max_abs. An overflow at S says that it is below S; with a loss that is not finite no scale would have
helped, and the ceiling is below 0, where a scale may end. So a ceiling is known as an interval, and between its ends lies an estimate:

* Activation gradients may overflow before those of parameters do. How much before, the run itself tells: by the median
  distance from the bound of the nearest clean attempt down to the scale of each overflow that was not far above it. The estimate of a clean
  attempt is its bound, less that.
* Ceilings move slowly. The estimate of an overflow is that of the nearest clean attempts, as far as it is below S.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from .recorded import Attempts, Reals

Case = Literal["worst", "likely", "best"]
CASES: Final[tuple[Case, ...]] = ("worst", "likely", "best")
_BELOW: Final = 1 - 2.0**-24
_SMALLEST: Final = 2.0**-149  # scale in float32 that is not 0
_NO_SCALE: Final = -1.0  # the ceiling of what overflows at a scale of 0, too


class Ceilings(NamedTuple):
    """The interval of each attempt's ceiling and the estimate within, scales, each of shape (n,); inf where unbounded."""

    worst: Reals
    likely: Reals
    best: Reals

    def of(self, case: Case) -> Reals:
        """One of the three."""
        return cast("Reals", getattr(self, case))


def ceilings(attempts: Attempts) -> Ceilings:
    """What the attempts tell of their ceilings. For any policy with the recorded scales each of the three gives what happened."""
    scale, clean = attempts.scale, ~attempts.overflow
    hopeless = attempts.overflow & (~attempts.loss_finite | (scale == 0))
    headroom = np.where(np.isnan(attempts.headroom_log2), np.inf, attempts.headroom_log2)
    best = np.where(clean, np.maximum(scale, _SMALLEST) * np.exp2(headroom), scale * _BELOW)
    worst = np.where(clean, scale, 0.0)
    likely = np.where(clean, _of_clean(attempts, best), best)
    likely = np.minimum(likely, _of_neighbours(attempts, likely))
    for ends in (worst, likely, best):
        ends[hopeless] = _NO_SCALE
    return Ceilings(worst, np.clip(likely, worst, best), best)


def _of_clean(attempts: Attempts, best: Reals) -> Reals:
    """The estimate of clean attempts: their bound less the run's own gap; without a bound, the nearest overflow's scale."""
    scale = attempts.scale
    overflows = np.flatnonzero(attempts.overflow & attempts.loss_finite & (scale > 0))
    bounded = np.flatnonzero(np.isfinite(best) & ~attempts.overflow)
    if not len(overflows):
        return best
    if len(bounded):
        gaps = np.log2(best[nearest(bounded, overflows)] / scale[overflows])
        near = gaps[gaps >= -1.0]  # a scale far above the bound overflows in any case
        best = best * 2.0 ** -(float(np.median(np.maximum(near, 0.0))) if len(near) else 0.0)
    met = scale[nearest(overflows, np.arange(len(scale)))] * _BELOW
    return np.where(np.isfinite(best), best, np.maximum(met, scale))


def _of_neighbours(attempts: Attempts, likely: Reals) -> Reals:
    """For overflows, the estimate of the nearest clean attempt before or after, whichever is lower; else infinite."""
    bound = np.full(len(likely), np.inf)
    overflows, clean = np.flatnonzero(attempts.overflow), np.flatnonzero(~attempts.overflow)
    if len(overflows) and len(clean):
        after = np.searchsorted(clean, overflows)
        sides = (clean[np.maximum(after - 1, 0)], clean[np.minimum(after, len(clean) - 1)])
        bound[overflows] = np.minimum(*(np.maximum(likely[side], attempts.scale[side]) for side in sides))
    return bound


def nearest(places: npt.NDArray[np.int64], to: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each of `to` the nearest of the sorted places."""
    after = np.minimum(np.searchsorted(places, to), len(places) - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(places[after] - to) < np.abs(to - places[before])
    return np.where(nearer, places[after], places[before])
