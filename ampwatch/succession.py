"""Which run a scaler records into, where a process trains several times in a row: a notebook, a sweep in a loop.

At its first use, while a run records that was begun before it was made:

| of what has trained in that run | run |
|---|---|
| a scaler, or an optimizer that one has stepped, is still there: two networks, a scaler made anew | the same |
| nothing is there, but it goes on: its scaler or optimizer was given a state, or it trains a parameter of before | the same, as of a process that was started again: another producer |
| nothing is there, and all is new | one of its own; the one before ends |

A scaler whose run was named is asked none of this. Neither is a copy of one, which records where that does.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from .recorder import Recorder, current, newest
from .registry import Owner, Sink, registry_of, state_of, step_of
from .settings import Settings

if TYPE_CHECKING:
    from .diagnosis.findings import Finding

_asked: weakref.WeakKeyDictionary[Recorder, int] = weakref.WeakKeyDictionary()
"""How often it was asked whether the training of a recorder is over, and it was not."""


def opened(
    settings: Settings, on_finding: Callable[[Finding], object] | None, owner: Owner | None
) -> Recorder:
    """The recorder of a scaler that is being made; of which run it is may be open until its first use.

    Arguments:
        owner: of the parameters that will be trained, as far as that is known.
    """
    before = newest()
    if before is not None and settings.run is None:
        registry = registry_of(before)
        if registry.has_attempts and not (owner is not None and registry.knows(owner)):
            return Recorder(settings, on_finding=on_finding, predecessor=before)
    return current(settings, on_finding=on_finding)


def joined(recorder: Sink) -> Recorder | None:
    """At the first use: the recorder to go over to, as its training is not over; None to stay with this one."""
    if recorder.predecessor is None or not isinstance(recorder, Recorder) or recorder.follows:
        return None
    before = newest()  # another scaler may have followed already
    if before is None:
        recorder.settle()
    elif _is_over(before):
        recorder.follow(before)
    else:
        recorder.join(before)
        return before
    return None


def settle(recorder: Sink, optimizer: Optimizer, *, is_restored: bool = False) -> None:
    """The first optimizer is met: it tells whether this training goes on with the one before.

    Arguments:
        is_restored: the scaler was given a state.
    """
    before = recorder.predecessor
    if before is None or not isinstance(recorder, Recorder) or not isinstance(before, Recorder):
        return
    goes_on = is_restored or _has_state(optimizer) or registry_of(before).knows(optimizer)
    recorder.settle(before.run if goes_on else None)


def _is_over(recorder: Recorder) -> bool:
    """Whether nothing is left of what has trained there.

    A scheduler holds its optimizer in a cycle, frameworks their scaler: only a collection tells. One is made at the
    1st, 2nd, 4th, 8th … time that it is asked, so that a scaler made anew at every epoch does not cost one each.
    """
    registry = registry_of(recorder)
    if not registry.has_attempts or registry.is_deserted:
        return registry.has_attempts
    count = _asked[recorder] = _asked.get(recorder, 0) + 1
    if count & (count - 1) == 0:
        gc.collect()
    return registry.is_deserted


def _has_state(optimizer: Optimizer) -> bool:
    """Whether it was given the state of steps taken before; some make one of zero steps when they are built."""
    if not state_of(optimizer):
        return False
    step = step_of(optimizer)
    return step is None or step.device.type != "cpu" or float(step) > 0
