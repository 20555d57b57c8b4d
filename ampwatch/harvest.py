"""From numbers in the ring to rows and events for the recorder. Torch-free.

Numbers come out of the ring in the order of the attempts. Whoever polls first, the training thread at an update or
the recorder's thread at a flush, digests what has arrived, under a lock that the training thread never waits for.
The training thread leaves ordinary attempts to the other, up to `TOGETHER` of them: at each of its own it would find
the caches full of the model's numbers. An attempt that it may have to follow, by sending statistics or by looking
closer, is not left.
The newest attempt stays open for a moment for what the user logs after update(). Rows and events are kept until they
are harvested; where the recorder does not keep pace the oldest are given up, and the loss is recorded.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .autopsy import SPIKE, Autopsies, Wanted
from .backlog import Backlog
from .escalation import STEEP, Escalation
from .origins import Origins
from .outcome import (
    AT,
    Attempt,
    Outcome,
    accumulated_data,
    applied_nonfinite,
    bits,
    by_optimizer,
    change_of,
    ordinary_norm,
    outcome_of,
    skip_data,
    totals_of,
)
from .records import ATTEMPT_COLUMNS, LOGGED_PREFIX, MISSING, Event, Table
from .stats.layout import SCALARS, WIDTH
from .stats.pages import empty
from .worker import Harvest

Numbers: TypeAlias = npt.NDArray[np.float64]

MOST_TENSOR_BYTES: Final = 8 << 20
TENSOR_BYTES: Final = 432 << 10  # of one harvest, which makes one batch; it lies there in several forms
MOST_ROWS: Final = 1 << 13  # 2 KiB each
MOST_EVENTS: Final = 1 << 13
MOST_WANTED: Final = 512  # of the last 64 attempts; what was asked of those before is gone from the device
DRAIN_S: Final = 2.0
TOGETHER: Final = 8  # attempts: of the flight recorder's, which all are asked of, a small part
OPEN_S: Final = 0.25  # how long the newest attempt waits for what is logged after it, if none follows


@dataclass(frozen=True)
class Seen:
    """What an observer saw: type of the event, and how its numbers become the event's data."""

    type: str
    decode: Callable[[Numbers], dict[str, Any]]
    attempt: int
    stream: int
    time: float


@dataclass(frozen=True)
class Rows:
    """Statistics of an attempt that were asked for; its numbers are tensors × WIDTH."""

    wanted: Wanted


Label: TypeAlias = Attempt | Seen | Rows


class Arrivals(Protocol):
    """What the harvester needs of a `ring.Ring`."""

    def __len__(self) -> int:
        """Vectors under way."""

    def arrivals(self) -> Iterator[tuple[Label, Numbers]]:
        """What has arrived since this was last asked, left where it is."""

    def receive(self) -> Iterator[tuple[Label, Numbers]]:
        """What has arrived."""


@dataclass(frozen=True)
class _TensorRows:
    attempt: int
    stream: int
    scale: float
    ids: npt.NDArray[np.int64]
    statistics: Numbers


@dataclass(frozen=True)
class _Newest:
    """The attempt digested last: its row and events lack the step and what is logged."""

    attempt: Attempt
    row: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    taken: int  # steps taken before it
    since: float


class Steps:
    """The step that a scaler's attempts have reached. It keeps no harvester alive, and is there when that is gone."""

    def __init__(self, harvester: Harvester) -> None:
        self._harvester = weakref.ref(harvester)
        self.taken = 0  # before the attempt that follows the last digested one
        self.offset = 0  # of the user's own step number
        self.sent = -1  # the newest attempt that is under way or was
        self.settled = -1  # the newest attempt whose step is known

    @property
    def coming(self) -> int:
        """Step of the attempt that follows the last digested one."""
        return self.taken + self.offset

    def are_known(self, attempt: int) -> bool:
        """Whether all attempts up to this one have been counted, or cannot be any more. Never waits."""
        harvester = self._harvester()
        return harvester is None or harvester.settles() or self.settled >= attempt


class Harvester:
    """The source of one scaler: digests attempts, and hands them to the recorder.

    Arguments:
        tensor_every: as for `Autopsies`.
        most_rows, most_events, most_tensor_bytes: what waits for the recorder at most, and then the oldest goes.
        drain_s: how long a harvest waits, at most, for what is under way at the end.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        tensor_every: int,
        most_rows: int = MOST_ROWS,
        most_events: int = MOST_EVENTS,
        most_tensor_bytes: int = MOST_TENSOR_BYTES,
        drain_s: float = DRAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drain_s, self._clock = drain_s, clock
        self._ring: Arrivals | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._rows: Backlog[dict[str, Any]] = Backlog("attempts", most_rows)
        self._events: Backlog[Event] = Backlog("events", most_events)
        self._tensors: Backlog[_TensorRows] = Backlog("tensors", most_tensor_bytes)
        self._newest: _Newest | None = None
        self._autopsies = Autopsies(tensor_every)
        self._wanted: deque[Wanted] = deque(maxlen=MOST_WANTED)
        self._glanced: dict[int, tuple[float, float]] = {}  # norm and loss of each stream's newest attempt
        self._waiting: Counter[int] = Counter()  # attempts of each stream that were glanced at since
        self._order_of: dict[int, list[str]] = {}
        self.steps = Steps(self)
        self._follows: tuple[Steps, int] | None = None  # until these are known up to this attempt
        self.escalation = Escalation()
        self.origins = Origins()
        self.scale: float | None = None  # that the last digested attempt left

    @property
    def step(self) -> int:
        """Step of the attempt that follows the last digested one."""
        return self.steps.coming

    def follow(self, steps: Steps) -> None:
        """Count on from another scaler's, of which some attempts may be under way. Before the first attempt."""
        self._follows = (steps, steps.sent)
        self.steps.taken, self.steps.offset, self.steps.sent = steps.taken, steps.offset, steps.sent

    def settles(self) -> bool:
        """Digest what has arrived, and say whether nothing is left to count. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._digest()
            self._settle(even_open=False)
            return self._is_counted and not (self._ring is not None and len(self._ring))
        finally:
            self._lock.release()

    def listen(self, ring: Arrivals) -> None:
        """Digest what arrives here."""
        self._ring = ring

    def close(self) -> None:
        """No attempt follows: what is under way is still harvested, then the ring is let go."""
        self._closed = True

    def advance(self, *, together: int = 1) -> None:
        """Digest what has arrived, unless the recorder's thread is at it. Never waits.

        Arguments:
            together: attempts that are digested in one go, while nothing has happened in them.
        """
        if self._lock.acquire(blocking=False):
            try:
                if (
                    self._begins()
                    and self._ring is not None
                    and (len(self._ring) >= together or self._has_news(self._ring))
                ):
                    self._digest()
            finally:
                self._lock.release()

    def _has_news(self, ring: Arrivals) -> bool:
        """Whether anything has arrived that only the training thread can follow: what is wanted of it, and is looked at."""
        return any([self._is_news(label, numbers) for label, numbers in ring.arrivals()])  # noqa: C419 - each is looked at

    def _is_news(self, label: Label, numbers: Numbers) -> bool:
        if not isinstance(label, Attempt):
            return True
        stream, norm, loss = label.stream, ordinary_norm(label, numbers), abs(float(numbers[3]))
        is_awaited = self._autopsies.awaits(label, self._waiting[stream])
        self._waiting[stream] += 1
        if norm is None:
            return True
        (norm_before, loss_before), self._glanced[stream] = (
            self._glanced.get(stream, (0.0, 0.0)),
            (norm, loss),
        )
        may_be_spike = norm > SPIKE * norm_before or loss > SPIKE * loss_before
        return is_awaited or may_be_spike or 0 < norm * STEEP <= norm_before

    def harvest(self, final: bool) -> Harvest:
        """Rows and events that are complete, tensors up to `TENSOR_BYTES`.

        With `final` it waits up to `drain_s` for what is under way.
        """
        if not self._lock.acquire(
            timeout=self._drain_s
        ):  # in a forked child its holder may not exist any more
            return Harvest()
        try:
            self._drain() if final else self._digest()
            self._settle(even_open=final)
            tensors, without_tensors = self._tensors.take(TENSOR_BYTES)
            rows, without_rows = self._rows.take()
            events, without_events = self._events.take()
            has_more = len(self._tensors) > 0
            is_last = self._closed and self._ring is None and self._is_counted and not has_more
        finally:
            self._lock.release()
        dropped = [*without_tensors, *without_rows, *without_events]
        return Harvest(_attempt_table(rows), _tensor_table(tensors), events + dropped, is_last, has_more)

    def next_wanted(self) -> Wanted | None:
        """The next statistics that are to be sent, as `Rows`; each is told once. Training thread only."""
        return self._wanted.popleft() if self._wanted else None

    def _drain(self) -> None:
        deadline = time.monotonic() + self._drain_s
        self._digest()
        while self._ring is not None and len(self._ring) and time.monotonic() < deadline:
            time.sleep(0.001)
            self._digest()

    @property
    def _is_counted(self) -> bool:
        """Whether the step is known of all that has been digested, and of what another counts on from."""
        return self._newest is None and self._follows is None

    def _begins(self) -> bool:
        """Whether it is known how many steps come before the first attempt."""
        if self._follows is None:
            return True
        before, attempt = self._follows
        if not before.are_known(attempt):
            return False
        self._follows = None
        self.steps.taken, self.steps.offset, self.steps.settled = before.taken, before.offset, attempt
        return True

    def _digest(self) -> None:
        if not self._begins() or self._ring is None:
            return
        self._waiting.clear()
        for label, numbers in self._ring.receive():
            if isinstance(label, Attempt):
                self._digest_attempt(label, numbers)
            elif isinstance(label, Rows):
                self._keep_tensors(label.wanted, numbers)
            else:
                self._digest_seen(label, numbers)
        if self._closed and not len(self._ring):
            self._ring = None

    def _digest_seen(self, seen: Seen, numbers: Numbers) -> None:
        data = seen.decode(numbers)
        if seen.type == "origin":
            self.origins.add(data["origins"])
        elif seen.type == "forward_search":
            self.escalation.searched(seen.stream, data)
        elif seen.type == "backward_order":
            self._autopsies.order(data["tensors"])
        elif seen.type == "replicas":
            self._autopsies.leave_to_the_first_rank(data.get("tensors", ()))
        if not data:  # it was looked for, and is not there
            return
        self._put(seen.type, seen.time, seen.attempt, seen.stream, data)

    def _digest_attempt(self, attempt: Attempt, numbers: Numbers) -> None:
        self._settle(even_open=True)  # another has followed it
        outcome = outcome_of(attempt, numbers)
        row = self._row(attempt, outcome)
        events = list(self._events_of(attempt, outcome, row))
        self._wanted += self._autopsies.add(attempt, outcome, row)
        self._newest = _Newest(attempt, row, events, self.steps.taken, self._clock())
        self._count(attempt, outcome)
        self.escalation.norm(attempt.stream, attempt.attempt, row["norm"])

    def _settle(self, *, even_open: bool) -> None:
        """Complete the newest attempt, unless it is open and young and the user may still log something for it."""
        newest = self._newest
        if newest is None:
            return
        if newest.attempt.logged.is_open and not even_open and self._clock() - newest.since < OPEN_S:
            return
        self._newest = None
        logged = newest.attempt.logged.close()
        if "step" in logged:
            self.steps.offset = int(logged.pop("step")) - newest.taken
        step = newest.taken + self.steps.offset
        self.steps.settled = newest.attempt.attempt
        row = newest.row | {"step": step} | {LOGGED_PREFIX + name: value for name, value in logged.items()}
        if not newest.attempt.has_loss:
            row["loss"] = logged.get("loss", MISSING)
        self._rows.put(row, newest.attempt.attempt)
        for type, data in newest.events:
            self._put(type, newest.attempt.time, newest.attempt.attempt, newest.attempt.stream, data, step)

    def _put(
        self, type: str, time: float, attempt: int, stream: int, data: dict[str, Any], step: int | None = None
    ) -> None:
        self._events.put(
            Event(type, time, attempt, self.step if step is None else step, stream, data=data), attempt
        )

    def _row(self, attempt: Attempt, outcome: Outcome) -> dict[str, Any]:
        return {
            "attempt": attempt.attempt,
            "stream": attempt.stream,
            "time": attempt.time,
            "scale": outcome.scale,
            "scale_after": outcome.scale_after,
            "growth_tracker": outcome.growth_tracker,
            "found_inf": bool(outcome.skipped),
            "stepped": bits(attempt.stepped),
            "skipped": bits(outcome.skipped),
            "losses": attempt.losses,
            "micro_batches": attempt.micro_batches,
            "updates": attempt.updates,
            "loss": outcome.loss,
            "residue": outcome.residue,
            "lr": MISSING if attempt.lr is None else attempt.lr,
            **totals_of(outcome, self.origins.are_float16(outcome.ids)),
            "applied_nonfinite": applied_nonfinite(attempt, outcome),
            **by_optimizer(attempt, outcome),
        }

    def _events_of(
        self, attempt: Attempt, outcome: Outcome, row: dict[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Type and data of the events of an attempt."""
        if not self._autopsies.knows(attempt.stream):
            yield (
                "stream",
                {"stream": attempt.stream, "scaler": attempt.scaler, "optimizers": attempt.found},
            )
        if self._order_of.get(attempt.stream) != attempt.order:
            self._order_of[attempt.stream] = attempt.order
            yield "calls", {"order": attempt.order}
        if outcome.skipped:
            yield "skip", skip_data(outcome, row)
        if seen := accumulated_data(attempt, outcome):
            yield "accumulated", seen
        if change := change_of(attempt, outcome):
            yield change, {"scale": outcome.scale, "scale_after": outcome.scale_after}

    def _keep_tensors(self, wanted: Wanted, numbers: Numbers) -> None:
        chosen = slice(None) if wanted.only is None else np.isin(wanted.ids, wanted.only)
        given, attempt = numbers.reshape(-1, WIDTH)[chosen], wanted.attempt
        statistics = empty(given.size).reshape(given.shape)
        statistics[...] = given
        rows = _TensorRows(attempt.attempt, attempt.stream, wanted.scale, wanted.ids[chosen], statistics)
        self._tensors.put(rows, rows.attempt, statistics.nbytes, records=len(rows.ids))

    def _count(self, attempt: Attempt, outcome: Outcome) -> None:
        self.steps.taken += bool(set(attempt.stepped) - set(outcome.skipped))
        self.scale = outcome.scale_after
        self.origins.add_clean([i for i in attempt.found if i not in outcome.skipped])
        is_finite = _looks_finite(attempt, outcome)
        nan_skip = bool(outcome.skipped) and outcome.has_nan
        self.escalation.add(attempt.stream, loss_is_finite=is_finite, nan_skip=nan_skip)
        broken = outcome.ids[outcome.n_nonfinite > 0].tolist() if is_finite and outcome.skipped else []
        self.escalation.overflowed(attempt.stream, self._autopsies.in_backward_order(broken))


def _looks_finite(attempt: Attempt, outcome: Outcome) -> bool:
    """Whether the loss is finite; where it is not known, and no scale can have made them so, the gradients."""
    if attempt.has_loss:
        return bool(np.isfinite(outcome.loss))
    return attempt.scaled or not outcome.n_nonfinite.any()


def _attempt_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    if not rows:
        return None
    added = sorted({name for row in rows for name in row if name not in ATTEMPT_COLUMNS})
    table = {name: np.array([row[name] for row in rows], dtype) for name, dtype in ATTEMPT_COLUMNS.items()}
    for name in added:
        table[name] = np.array([row.get(name, MISSING) for row in rows], np.float64)
    return table


def _tensor_table(kept: Sequence[_TensorRows]) -> Table | None:
    if not kept:
        return None
    counts = [len(rows.ids) for rows in kept]
    statistics = np.concatenate([rows.statistics for rows in kept])
    table = {
        "attempt": np.repeat([rows.attempt for rows in kept], counts),
        "stream": np.repeat([rows.stream for rows in kept], counts),
        "tensor": np.concatenate([rows.ids for rows in kept]),
        "scale": np.repeat([rows.scale for rows in kept], counts),
        "hist": statistics[:, len(SCALARS) :].astype(np.int64),
    }
    reals = {"max_abs", "sum_sq"}
    for name, column in AT.items():
        table[name] = statistics[:, column] if name in reals else statistics[:, column].astype(np.int64)
    return table
