"""From numbers in the ring to rows and events for the recorder. Torch-free.

Numbers come out of the ring in the order of the attempts. Whoever polls first, the training thread at an update or
the recorder's thread at a flush, digests what has arrived, under a lock that the training thread never waits for.
Rows of attempts and events are kept until they are harvested; of tensor rows, which are large, the oldest are
given up where the recorder does not keep pace, and the loss is recorded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .escalation import Escalation
from .origins import Origins
from .outcome import (
    AT,
    Attempt,
    Outcome,
    applied_nonfinite,
    bits,
    change_of,
    outcome_of,
    skip_data,
    totals_of,
)
from .records import ATTEMPT_COLUMNS, LOGGED_PREFIX, MISSING, Event, Table
from .stats.layout import SCALARS
from .worker import Harvest

Numbers: TypeAlias = npt.NDArray[np.float64]

DENSE: Final = 64  # attempts of a stream from its start whose tensors are recorded
AUTOPSIES: Final = 8  # skipped attempts whose tensors are recorded in full, then one in …
AUTOPSY_EVERY: Final = 500  # … this many attempts
MOST_TENSOR_BYTES: Final = 32 << 20
MOST_ROWS: Final = 1 << 17
DRAIN_S: Final = 2.0


@dataclass(frozen=True)
class Seen:
    """What an observer saw: type of the event, and how its numbers become the event's data."""

    type: str
    decode: Callable[[Numbers], dict[str, Any]]
    attempt: int
    stream: int
    time: float


Label: TypeAlias = Attempt | Seen


class Arrivals(Protocol):
    """What the harvester needs of a `ring.Ring`."""

    def __len__(self) -> int:
        """Vectors under way."""

    def receive(self) -> Iterator[tuple[Label, Numbers]]:
        """What has arrived."""


@dataclass(frozen=True)
class _TensorRows:
    attempt: Attempt
    scale: float
    ids: npt.NDArray[np.int64]
    statistics: Numbers


class Harvester:
    """The source of one scaler: digests attempts, and hands them to the recorder.

    Arguments:
        tensor_every: attempts of a stream from one whose tensors are recorded to the next, after the first 64.
        most_tensor_bytes: of statistics that wait for the recorder; beyond them the oldest are given up.
        drain_s: how long a harvest waits, at most, for what is under way at the end.
    """

    def __init__(
        self, *, tensor_every: int, most_tensor_bytes: int = MOST_TENSOR_BYTES, drain_s: float = DRAIN_S
    ) -> None:
        self._tensor_every = tensor_every
        self._most_tensor_bytes = most_tensor_bytes
        self._drain_s = drain_s
        self._ring: Arrivals | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._rows: deque[dict[str, Any]] = deque(maxlen=MOST_ROWS)
        self._tensors: deque[_TensorRows] = deque()
        self._tensor_bytes = 0
        self._events: list[Event] = []
        self._given_up: list[int] = []
        self._attempts_of: dict[int, int] = {}
        self._order_of: dict[int, list[str]] = {}
        self._autopsies = 0
        self._last_autopsy = -AUTOPSY_EVERY
        self._taken = 0
        self._step_offset = 0
        self.escalation = Escalation()
        self.origins = Origins()
        self.scale: float | None = None  # that the last digested attempt left

    @property
    def step(self) -> int:
        """Step of the attempt that follows the last digested one."""
        return self._taken + self._step_offset

    def listen(self, ring: Arrivals) -> None:
        """Digest what arrives here."""
        self._ring = ring

    def close(self) -> None:
        """No attempt follows: what is under way is still harvested, then the ring is let go."""
        self._closed = True

    def advance(self) -> None:
        """Digest what has arrived, unless the recorder's thread is at it. Never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._digest()
            finally:
                self._lock.release()

    def harvest(self, final: bool) -> Harvest:
        """Rows and events that are complete; with `final` it waits up to `drain_s` for what is under way."""
        if not self._lock.acquire(
            timeout=self._drain_s
        ):  # in a forked child its holder may not exist any more
            return Harvest()
        try:
            self._drain() if final else self._digest()
            rows, self._rows = self._rows, deque(maxlen=MOST_ROWS)
            tensors, self._tensors, self._tensor_bytes = self._tensors, deque(), 0
            events, self._events = self._events, []
            given_up, self._given_up = self._given_up, []
        finally:
            self._lock.release()
        if given_up:
            events.append(_dropped(given_up))
        return Harvest(_attempt_table(rows), _tensor_table(tensors), events)

    def _drain(self) -> None:
        deadline = time.monotonic() + self._drain_s
        self._digest()
        while self._ring is not None and len(self._ring) and time.monotonic() < deadline:
            time.sleep(0.001)
            self._digest()

    def _digest(self) -> None:
        if self._ring is None:
            return
        for label, numbers in self._ring.receive():
            if isinstance(label, Attempt):
                self._digest_attempt(label, numbers)
            else:
                self._digest_seen(label, numbers)
        if self._closed and not len(self._ring):
            self._ring = None

    def _digest_seen(self, seen: Seen, numbers: Numbers) -> None:
        data = seen.decode(numbers)
        if seen.type == "origin":
            self.origins.add(data["origins"])
        self._events.append(Event(seen.type, seen.time, seen.attempt, self.step, seen.stream, data=data))

    def _digest_attempt(self, attempt: Attempt, numbers: Numbers) -> None:
        if "step" in attempt.logged:
            self._step_offset = int(attempt.logged["step"]) - self._taken
        outcome = outcome_of(attempt, numbers)
        row = self._row(attempt, outcome)
        self._tell(attempt, outcome, row)
        self._rows.append(row)
        if self._is_recorded(attempt, outcome):
            self._keep_tensors(attempt, outcome)
        self._count(attempt, outcome)

    def _row(self, attempt: Attempt, outcome: Outcome) -> dict[str, Any]:
        logged = {LOGGED_PREFIX + name: value for name, value in attempt.logged.items() if name != "step"}
        return {
            "attempt": attempt.attempt,
            "stream": attempt.stream,
            "step": self.step,
            "time": attempt.time,
            "scale": outcome.scale,
            "scale_after": outcome.scale_after,
            "growth_tracker": outcome.growth_tracker,
            "found_inf": bool(outcome.skipped),
            "stepped": bits(attempt.stepped),
            "skipped": bits(outcome.skipped),
            "losses": attempt.losses,
            "micro_batches": attempt.micro_batches,
            "loss": outcome.loss,
            "lr": MISSING if attempt.lr is None else attempt.lr,
            **totals_of(outcome, self.origins.float16),
            "applied_nonfinite": applied_nonfinite(attempt, outcome),
            **logged,
        }

    def _tell(self, attempt: Attempt, outcome: Outcome, row: dict[str, Any]) -> None:
        """The events of an attempt."""
        if attempt.stream not in self._attempts_of:
            members = {"stream": attempt.stream, "scaler": attempt.scaler, "optimizers": attempt.found}
            self._add_event("stream", attempt, members)
        if self._order_of.get(attempt.stream) != attempt.order:
            self._order_of[attempt.stream] = attempt.order
            self._add_event("calls", attempt, {"order": attempt.order})
        if outcome.skipped:
            self._add_event("skip", attempt, skip_data(outcome, row))
        if change := change_of(attempt, outcome):
            self._add_event(change, attempt, {"scale": outcome.scale, "scale_after": outcome.scale_after})

    def _add_event(self, type: str, attempt: Attempt, data: dict[str, Any]) -> None:
        self._events.append(Event(type, attempt.time, attempt.attempt, self.step, attempt.stream, data=data))

    def _is_recorded(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Whether this attempt's tensor rows are kept: settings.tensor_every, and the autopsies."""
        if not len(outcome.ids):
            return False
        count = self._attempts_of.get(attempt.stream, 0)
        if outcome.n_nonfinite.any() and self._is_autopsied(attempt.attempt):
            return True
        return count < DENSE or count % self._tensor_every == 0

    def _is_autopsied(self, attempt: int) -> bool:
        if self._autopsies >= AUTOPSIES and attempt - self._last_autopsy < AUTOPSY_EVERY:
            return False
        self._autopsies += 1
        self._last_autopsy = attempt
        return True

    def _keep_tensors(self, attempt: Attempt, outcome: Outcome) -> None:
        rows = _TensorRows(attempt, outcome.scale, outcome.ids, outcome.statistics.copy())
        self._tensors.append(rows)
        self._tensor_bytes += rows.statistics.nbytes
        while self._tensor_bytes > self._most_tensor_bytes and len(self._tensors) > 1:
            oldest = self._tensors.popleft()
            self._tensor_bytes -= oldest.statistics.nbytes
            self._given_up.append(oldest.attempt.attempt)

    def _count(self, attempt: Attempt, outcome: Outcome) -> None:
        self._attempts_of[attempt.stream] = self._attempts_of.get(attempt.stream, 0) + 1
        self._taken += bool(set(attempt.stepped) - set(outcome.skipped))
        self.scale = outcome.scale_after
        self.origins.add_clean(set(attempt.found) - set(outcome.skipped))
        is_finite = not attempt.has_loss or bool(np.isfinite(outcome.loss))
        self.escalation.add(attempt.stream, skipped=bool(outcome.skipped), loss_is_finite=is_finite)


def _dropped(attempts: list[int]) -> Event:
    lost = {"kind": "tensors", "first_seq": -1, "last_seq": -1, "reason": "the recorder did not keep pace"}
    data = lost | {"first_attempt": attempts[0], "last_attempt": attempts[-1], "count": len(attempts)}
    return Event("dropped", time.time(), data=data)


def _attempt_table(rows: Sequence[dict[str, Any]]) -> Table | None:
    if not rows:
        return None
    logged = sorted({name for row in rows for name in row if name.startswith(LOGGED_PREFIX)})
    table = {name: np.array([row[name] for row in rows], dtype) for name, dtype in ATTEMPT_COLUMNS.items()}
    for name in logged:
        table[name] = np.array([row.get(name, MISSING) for row in rows], np.float64)
    return table


def _tensor_table(kept: Sequence[_TensorRows]) -> Table | None:
    if not kept:
        return None
    counts = [len(rows.ids) for rows in kept]
    statistics = np.concatenate([rows.statistics for rows in kept])
    table = {
        "attempt": np.repeat([rows.attempt.attempt for rows in kept], counts),
        "stream": np.repeat([rows.attempt.stream for rows in kept], counts),
        "tensor": np.concatenate([rows.ids for rows in kept]),
        "scale": np.repeat([rows.scale for rows in kept], counts),
        "hist": statistics[:, len(SCALARS) :].astype(np.int64),
    }
    reals = {"max_abs", "sum_sq"}
    for name, column in AT.items():
        table[name] = statistics[:, column] if name in reals else statistics[:, column].astype(np.int64)
    return table
