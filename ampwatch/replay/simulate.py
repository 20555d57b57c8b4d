"""A policy run again over the ceilings of a recorded run: which attempts it would have lost, and the path of its scale.

Exact for the policy. Approximate for the training, which would have gone another way had another step been lost.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .policies import Policy, Stopped
from .recorded import Reals

_WINDOW: Final = 1 << 13


class Path(NamedTuple):
    """What a policy did.

    Arguments:
        at: places of the attempts, counted from 0, from which on the scale is another; the first is 0. int64, (k,).
        scale: that scale, (k,).
        lost: places of the attempts that it skipped; int64.
        stopped: what the scaler said when it raised, None where it did not; `lost` ends there.
        final: the scale after the last attempt.
    """

    at: npt.NDArray[np.int64]
    scale: Reals
    lost: npt.NDArray[np.int64]
    stopped: str | None
    final: float

    def scales(self, attempts: int) -> Reals:
        """The scale of each of so many attempts."""
        return np.repeat(self.scale, np.diff(np.append(self.at, attempts)))


def simulate(policy: Policy, ceiling: Reals) -> Path:
    """Run a policy, from its state, over attempts with these ceilings; clean stretches are taken at once."""
    attempts = len(ceiling)
    at, scale = [0], [policy.scale]
    lost: list[int] = []
    place, stopped = 0, None
    while place < attempts:
        changes = place + policy.quiet()  # the scale may change here, or at an overflow before
        end = min(changes + 1, attempts)
        found = _first_below(ceiling, policy.scale, place, end)
        policy.advance(min(found, changes, attempts) - place)
        if found == end <= changes:
            break
        place = min(found, changes)
        if found < end:
            lost.append(place)
        try:
            policy.update(found < end)
        except Stopped as reason:
            stopped = str(reason)
            break
        place += 1
        if policy.scale != scale[-1] and place < attempts:
            at.append(place)
            scale.append(policy.scale)
    return Path(np.array(at, np.int64), np.array(scale), np.array(lost, np.int64), stopped, policy.scale)


def _first_below(ceiling: Reals, scale: float, start: int, stop: int) -> int:
    """The first place from `start` on whose ceiling is below the scale, `stop` where none is before it."""
    if stop - start == 1:  # a policy that moves at every attempt asks so for each
        return start if ceiling[start] < scale else stop
    while start < stop:
        below = ceiling[start : min(start + _WINDOW, stop)] < scale
        first = int(below.argmax())
        if below[first]:
            return start + first
        start += _WINDOW
    return stop
