"""Of which attempts, and of which of their tensors, the statistics are recorded. Torch-free.

every `tensor_every` attempts of a stream, and its first 64         all tensors
around a skip, a loss that is not finite, a spike                   all tensors of the attempts that the flight
  (the first 8 of a run, then one in 500 attempts)                    recorder still has, and of the next few
around any other                                                    where it began, and the 16 worst, in the
                                                                      attempts next to it

Tensors whose gradients another rank has too (DDP) are that rank's to send. Here they are only sent around a loss of
this rank's own that is not finite, as above, and around any other trouble where it began and the 16 worst.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .outcome import AT, Attempt, Outcome

Ids: TypeAlias = npt.NDArray[np.int64]

DENSE: Final = 64  # attempts of a stream from its start whose tensors are recorded
AUTOPSIES: Final = 8  # in full, then one in …
AUTOPSY_EVERY: Final = 500  # … this many attempts
BEFORE: Final = 64  # attempts that the flight recorder has at most
AFTER: Final = 4
BEFORE_IN_PART: Final = 4
AFTER_IN_PART: Final = 1
WORST: Final = 16
SPIKE: Final = 4.0  # times the largest of …
LEVELS: Final = 64  # … so many attempts of the stream before, …
FEWEST_LEVELS: Final = 16  # … of which there are at least as many


@dataclass(frozen=True)
class Wanted:
    """Statistics that are to be sent; `only`: of these tensors, None for all."""

    attempt: Attempt
    scale: float
    ids: Ids
    only: Ids | None

    def of(self, some: slice) -> Wanted:
        """The same of some of its tensors."""
        return replace(self, ids=self.ids[some])


@dataclass
class _Recent:
    """One of the last attempts, and what of it was asked for."""

    attempt: Attempt
    scale: float
    ids: Ids
    in_part: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    in_full: bool = False


class _Levels:
    """The last values of a stream, by which a spike is told."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LEVELS)

    def is_spike(self, value: float) -> bool:
        """Whether it is far above those before; it is one of them from now on."""
        if not math.isfinite(value):
            return False
        value = abs(value)
        spikes = len(self._last) >= FEWEST_LEVELS and value > SPIKE * max(self._last) > 0
        self._last.append(value)
        return spikes


class Autopsies:
    """Says after each attempt what is to be sent.

    Arguments:
        tensor_every: attempts of a stream from one whose tensors are recorded to the next, after the first `DENSE`.
    """

    def __init__(self, tensor_every: int) -> None:
        self._tensor_every = tensor_every
        self._recent: deque[_Recent] = deque(maxlen=BEFORE)
        self._attempts_of: dict[int, int] = {}
        self._levels: dict[tuple[int, str], _Levels] = {}
        self._places: dict[int, int] = {}  # of tensors in backward order
        self._count = 0
        self._last = -AUTOPSY_EVERY
        self._full_until = self._part_until = -1
        self._part: Ids = np.empty(0, np.int64)
        self._copies: Ids = np.empty(0, np.int64)

    def knows(self, stream: int) -> bool:
        """Whether the stream has had an attempt."""
        return stream in self._attempts_of

    def order(self, tensors: Iterable[int]) -> None:
        """The order in which gradients are accumulated, those next to the loss first."""
        self._places = {tensor: place for place, tensor in enumerate(tensors)}

    def leave_to_the_first_rank(self, tensors: Iterable[int]) -> None:
        """The gradients of these tensors are the same on another rank, which sends them."""
        self._copies = np.array(list(tensors), np.int64)

    def in_backward_order(self, tensors: Iterable[int]) -> list[int]:
        """These tensors, those whose gradients come first ahead; those of which that is not known last."""
        return sorted(tensors, key=lambda tensor: self._places.get(tensor, len(self._places)))

    def awaits(self, attempt: Attempt, ahead: int) -> bool:
        """Whether statistics of an attempt are wanted whatever it brings.

        Arguments:
            ahead: attempts of its stream that come before it and are not added yet.
        """
        is_due = self._is_due(self._attempts_of.get(attempt.stream, 0) + ahead)
        return is_due or attempt.attempt <= max(self._full_until, self._part_until)

    def _is_due(self, count: int) -> bool:
        return count < DENSE or count % self._tensor_every == 0

    def add(self, attempt: Attempt, outcome: Outcome, row: dict[str, Any]) -> list[Wanted]:
        """The next attempt, with its row; answers what is wanted of it and of those before, oldest first."""
        count = self._attempts_of.get(attempt.stream, 0)
        self._attempts_of[attempt.stream] = count + 1
        loss_breaks = attempt.has_loss and not math.isfinite(outcome.loss)
        is_trouble = self._has_spike(attempt, row) or loss_breaks or bool(outcome.n_nonfinite.any())
        if not len(outcome.ids):
            return []
        now = _Recent(attempt, outcome.scale, outcome.ids)
        self._recent.append(now)
        own = np.setdiff1d(outcome.ids, self._copies) if len(self._copies) else outcome.ids
        has_copies = len(own) < len(outcome.ids)
        is_due = self._is_due(count)
        if attempt.attempt <= self._full_until or (is_due and not has_copies):
            return _all_of([now])
        due = _some_of([now], own) if is_due else []
        if not is_trouble:
            return due + (_some_of([now], self._part) if attempt.attempt <= self._part_until else [])
        if (loss_breaks or not has_copies) and self._may_be_full(attempt.attempt):
            return due + _all_of(self._recent)
        self._part, self._part_until = self._chosen(outcome), attempt.attempt + AFTER_IN_PART
        return due + _some_of(list(self._recent)[-1 - BEFORE_IN_PART :], self._part)

    def _may_be_full(self, attempt: int) -> bool:
        """Whether another autopsy in full is due; it is one of them from now on."""
        if self._count >= AUTOPSIES and attempt - self._last < AUTOPSY_EVERY:
            return False
        self._count += 1
        self._last, self._full_until = attempt, attempt + AFTER
        return True

    def _has_spike(self, attempt: Attempt, row: dict[str, Any]) -> bool:
        """To be asked of each attempt: it remembers the levels of both."""
        spikes = [self._level(attempt.stream, name).is_spike(row[name]) for name in ("loss", "norm")]
        return any(spikes)

    def _level(self, stream: int, name: str) -> _Levels:
        return self._levels.setdefault((stream, name), _Levels())

    def _chosen(self, outcome: Outcome) -> Ids:
        """Where it began (inf without NaN, and the first in backward order), and the worst: ids, ascending."""
        nonfinite, max_abs = outcome.n_nonfinite, outcome.columns[AT["max_abs"]]
        share = nonfinite / np.maximum(outcome.columns[AT["numel"]], 1)
        worst = np.lexsort((-max_abs, -share))[:WORST]
        only_inf = np.flatnonzero((nonfinite > 0) & (outcome.columns[AT["n_nan"]] == 0))[:WORST]
        return np.unique(np.concatenate([outcome.ids[worst], outcome.ids[only_inf], self._first(outcome)]))

    def _first(self, outcome: Outcome) -> Ids:
        broken = [i for i in outcome.ids[outcome.n_nonfinite > 0].tolist() if i in self._places]
        return np.array([min(broken, key=self._places.__getitem__)] if broken else [], np.int64)


def _all_of(recent: Iterable[_Recent]) -> list[Wanted]:
    wanted = []
    for each in recent:
        if not each.in_full:
            only = None if not len(each.in_part) else np.setdiff1d(each.ids, each.in_part)
            each.in_full = True
            wanted.append(Wanted(each.attempt, each.scale, each.ids, only))
    return wanted


def _some_of(recent: Iterable[_Recent], tensors: Ids) -> list[Wanted]:
    return [wanted for each in recent if not each.in_full for wanted in _part_of(each, tensors)]


def _part_of(each: _Recent, tensors: Ids) -> Iterator[Wanted]:
    only = np.setdiff1d(np.intersect1d(tensors, each.ids), each.in_part)
    if len(only):
        each.in_part = np.union1d(each.in_part, only)
        yield Wanted(each.attempt, each.scale, each.ids, only)
