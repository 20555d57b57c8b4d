"""The ranks of a run against each other: scales, skips or gradients that differ, and a rank that alone breaks the loss.

What breaks is the rank's own loss, or its gradients before they are reduced (event `local_gradients`). The lowest rank
is compared with every other, attempt by attempt, each attempt once: what arrives late lets the two be compared anew.
Attempts that only one of them has are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from ampwatch.records import is_missing

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .moments import Moment, moment_of
from .replicas import Apart, Norms, apart
from .rows import Ledger, Rows

LONELY_RUN, LONELY_COUNT = 3, 6  # attempts in a row, or in all, in which one rank alone has a non-finite loss
SETTLES: Final = (
    16  # skips from the start after which gradients of one rank alone are no calibration any more
)
MOST_REPEATS: Final = 64  # of an event that stands for many
TOGETHER_S: Final = 600.0  # ranks of a job start within so many seconds


class Member(NamedTuple):
    """A producer with what it recorded."""

    case: Case
    ledger: Ledger


class Difference(NamedTuple):
    """The first attempt in which two ranks differ: scale and skip of each."""

    at: Moment
    scales: tuple[float, float]
    skips: tuple[bool, bool]


@dataclass(slots=True)
class _Alone:
    """Attempts in which one rank alone has a loss, or gradients, that are not finite."""

    by_gradients: bool = False  # which overflow now and then in a healthy run
    count: int = 0
    run: int = 0
    longest: int = 0
    first: Moment | None = None

    def add(self, at: Moment, *, alone: bool) -> None:
        self.run = self.run + 1 if alone else 0
        self.longest = max(self.longest, self.run)
        if alone:
            self.count += 1
            self.first = self.first or at

    @property
    def proves(self) -> bool:
        return self.longest >= LONELY_RUN or (not self.by_gradients and self.count >= LONELY_COUNT)

    @property
    def is_clear(self) -> bool:
        return not self.proves if self.by_gradients else not self.count


@dataclass(slots=True)
class _Pair:
    """Two ranks, compared up to an attempt."""

    restarts: tuple[int, int] = (0, 0)
    upto: int = -1
    difference: Difference | None = None
    lower: _Alone = field(default_factory=_Alone)
    higher: _Alone = field(default_factory=_Alone)
    norms: Norms = field(default_factory=Norms)

    def compare(self, a: Ledger, b: Ledger) -> None:
        upto = min(a.last, b.last)
        if upto <= self.upto:  # nothing new that both have
            return
        rows, others = a.between(self.upto, upto), b.between(self.upto, upto)
        if not np.array_equal(rows["attempt"], others["attempt"]):
            _, i, j = np.intersect1d(
                rows["attempt"], others["attempt"], assume_unique=True, return_indices=True
            )
            rows, others = rows[i], others[j]
        self._differ(rows, others)
        self._alone(rows, others)
        self.norms.fold(rows, others)
        self.upto = upto

    def _differ(self, a: Rows, b: Rows) -> None:
        differs = np.flatnonzero((a["scale"] != b["scale"]) | (a["skipped"] != b["skipped"]))
        if len(differs) and self.difference is None:
            x, y = a[differs[0]], b[differs[0]]
            scales = float(x["scale"]), float(y["scale"])
            self.difference = Difference(moment_of(x), scales, (bool(x["skipped"]), bool(y["skipped"])))

    def _alone(self, a: Rows, b: Rows) -> None:
        bad_a, bad_b = (~np.isfinite(rows["loss"]) & ~is_missing(rows["loss"]) for rows in (a, b))
        if not (bad_a.any() or bad_b.any()):
            self.lower.run = self.higher.run = 0
            return
        for row, x, y in zip(a, bad_a, bad_b, strict=True):
            self.lower.add(moment_of(row), alone=bool(x and not y))
            self.higher.add(moment_of(row), alone=bool(y and not x))


class Agreement:
    """What the ranks of a run say of each other."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def findings(self, members: Sequence[Member]) -> Iterator[Finding]:
        """Compare what is new, and tell what differs."""
        told = list(self._compared(members))
        if not told:
            return
        if (finding := _disagreement(told)) is not None:
            yield finding
        losses = list(_lonely([(a, b, pair.lower, pair.higher) for a, b, pair in told], "loss"))
        yield from losses or _lonely([(a, b, *_by_gradients(a, b)) for a, b, _ in told], "gradients")

    def _compared(self, members: Sequence[Member]) -> Iterator[tuple[Case, Case, _Pair]]:
        lowest = min((member.case.rank for member in members), default=0)
        others = [member for member in members if member.case.rank != lowest]
        for lower in members:
            if lower.case.rank == lowest:
                yield from self._against(lower, others)

    def _against(self, lower: Member, others: Sequence[Member]) -> Iterator[tuple[Case, Case, _Pair]]:
        for higher in others:
            if _together(lower.case, higher.case):
                yield lower.case, higher.case, self._pair(lower, higher)

    def _pair(self, a: Member, b: Member) -> _Pair:
        key, restarts = (a.case.producer, b.case.producer), (a.ledger.restarts, b.ledger.restarts)
        pair = self._pairs.get(key)
        if pair is None or pair.restarts != restarts:
            pair = self._pairs[key] = _Pair(restarts)
        pair.compare(a.ledger, b.ledger)
        return pair


def _together(a: Case, b: Case) -> bool:
    """Whether two producers are ranks of one job, and not of one that was started again."""
    apart = abs(a.stream.time_first - b.stream.time_first)
    return not apart > TOGETHER_S


def _disagreement(told: Sequence[tuple[Case, Case, _Pair]]) -> Finding | None:
    """What differs first; that ranks train by themselves only where every one does, and nothing else is known."""
    found = [(a, b, apart(a, b, pair.norms)) for a, b, pair in told]
    sure = [
        *(_of_steps(a, b, pair.difference) for a, b, pair in told if pair.difference),
        *(_of_model(a, b, seen) for a, b, seen in found if seen is not None and seen.what != "alone"),
    ]
    if sure:
        return min(sure, key=lambda finding: finding.first_attempt)
    alone = [_of_model(a, b, seen) for a, b, seen in found if seen is not None]
    return alone[0] if len(alone) == len(told) else None


def _of_steps(lower: Case, higher: Case, seen: Difference) -> Finding:
    states = [
        f"rank {rank}: loss scale {texts.power(scale)}, {'skipped' if skip else 'stepped'}"
        for rank, scale, skip in zip((lower.rank, higher.rank), seen.scales, seen.skips, strict=True)
    ]
    evidence = Evidence(text=f"At {texts.at(seen.at)}: {'; '.join(states)}.", attempt=seen.at.attempt)
    return _of_two(lower, higher, "rank_disagreement", seen.at, evidence)


def _of_model(lower: Case, higher: Case, seen: Apart) -> Finding:
    low, high = (f"{value:.6g}" for value in seen.values)
    text = texts.APART[seen.what].format(
        first=texts.at(seen.at), lower=lower.rank, higher=higher.rank, low=low, high=high
    )
    evidence = Evidence(text=text, value=seen.values[1], attempt=seen.at.attempt)
    return _of_two(lower, higher, f"rank_disagreement.{seen.what}", seen.at, evidence)


def _of_two(lower: Case, higher: Case, key: str, at: Moment, evidence: Evidence) -> Finding:
    is_meant = key == "rank_disagreement.alone"  # perhaps
    return lower.finding(
        "rank_disagreement",
        "warning" if is_meant else "fatal",
        texts.HEADLINES[key].format(first=texts.at(at), low=lower.rank, high=higher.rank),
        first=at,
        evidence=[evidence],
        advice=texts.ADVICE[key],
        confidence=0.7 if is_meant else 1.0,
    )


def _by_gradients(lower: Case, higher: Case) -> tuple[_Alone, _Alone]:
    """Of attempts in which both looked at their own gradients, those in which only one's were not finite.

    Ordinary overflows are left out: those before the scale has settled, and few of them in a row.
    """
    alone = _Alone(by_gradients=True), _Alone(by_gradients=True)
    a, b = _own_gradients(lower), _own_gradients(higher)
    before = -2
    for attempt in sorted(a.keys() & b.keys()):
        if attempt != before + 1:
            alone[0].run = alone[1].run = 0
        before, at = attempt, Moment(attempt, lower.step_of(attempt))
        alone[0].add(at, alone=a[attempt] and not b[attempt])
        alone[1].add(at, alone=b[attempt] and not a[attempt])
    return alone


def _own_gradients(case: Case) -> dict[int, bool]:
    """Whether gradients of the rank's own were not finite, by attempt of its first stream."""
    stream = case.stream
    begin = stream.first_taken or stream.first
    if begin is None:
        return {}
    since = begin.attempt + (0 if stream.first_taken else SETTLES)
    return {
        attempt: bool(event.data.get("nonfinite"))
        for event in case.described.local_gradients.events
        for attempt in range(event.attempt, event.attempt + min(event.repeat, MOST_REPEATS))
        if event.stream == case.index and attempt > since
    }


def _lonely(told: Sequence[tuple[Case, Case, _Alone, _Alone]], what: str) -> Iterator[Finding]:
    """The lowest rank if it is alone against all, another if it is alone against the lowest and no further one is."""
    if all(lower.proves and higher.is_clear for _, _, lower, higher in told):
        yield _fault(told[0][0], told[0][2], len(told), what)
        return
    alone = [(case, higher) for _, case, lower, higher in told if higher.proves and lower.is_clear]
    if len(alone) == 1:
        yield _fault(*alone[0], len(told), what)


def _fault(case: Case, seen: _Alone, others: int, what: str) -> Finding:
    assert seen.first is not None
    key = {"loss": "rank_fault", "gradients": "rank_fault.gradients"}[what]
    text = texts.ALONE[what].format(
        count=texts.times(seen.count), rank=case.rank, others=texts.times(others, "other rank")
    )
    return case.finding(
        "rank_fault",
        "fatal",
        texts.HEADLINES[key].format(first=texts.at(seen.first), rank=case.rank),
        first=seen.first,
        evidence=[Evidence(text=text, value=seen.count, unit="attempts", attempt=seen.first.attempt)],
        advice=texts.fill(texts.ADVICE[key], rank=case.rank),
        confidence=0.9,
    )
