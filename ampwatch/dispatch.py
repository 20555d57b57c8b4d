"""What one watch sends from the training thread: attempts and observations through the ring, events beside it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .flight import FlightRecorder
from .guard import Report, guard
from .harvest import TENSOR_BYTES, TOGETHER, Harvester, Label, Rows, Seen
from .hooks import Observation
from .outcome import Attempt
from .registry import Registry, Sink
from .ring import Memory, Ring
from .stats.layout import SCALARS, WIDTH

AT_ONCE: Final = 4  # attempts whose statistics are sent at one update …
PORTION: Final = TENSOR_BYTES // (8 * WIDTH)  # … in vectors of so many tensors
AHEAD: Final = 16 + TOGETHER  # attempts that the host is ahead of a GPU before more memory is made
MOST_BYTES: Final = 4 << 20  # under way, beyond which no more of them are sent
_OUTRUN: Final = {"first_seq": -1, "last_seq": -1, "reason": "the device did not keep pace"}


class Closable(Protocol):
    """What a watch leaves behind: hooks, and numbers under way."""

    def close(self) -> None:
        """Nothing follows."""


def close_with(watch: object, report: Report, *parts: Closable) -> None:
    """Close these, one by one, when the watch is gone; not at interpreter exit, where the recorder still harvests."""
    for part in reversed(parts):  # the last that is registered comes first
        weakref.finalize(watch, guard("watch.close", report)(_close), part).atexit = False


class Dispatch:
    """Sends for one watch, and says what was lost where the device does not keep pace. Nothing here synchronises.

    Arguments:
        recorder: takes the records.
        registry: knows the number of the coming attempt.
        clock: Unix time in seconds.
        memory: host memory for the ring, see `Ring`.
    """

    def __init__(
        self,
        recorder: Sink,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.time,
        memory: Memory | None = None,
    ) -> None:
        self._recorder, self._registry = recorder, registry
        self._clock, self._memory = clock, memory
        self._ring: Ring[Label] | None = None
        self._flight = FlightRecorder()
        self.harvester = Harvester(tensor_every=recorder.settings.tensor_every)
        self._is_ready = False  # memory for what follows has been made
        self.stream = -1  # index, once there is one
        self._attempts = 0
        self._last_of: dict[int, int] = {}  # of each stream
        recorder.attach(self.harvester)

    def since_last(self) -> int:
        """How many attempts there are since the last of this stream, the coming one included; -1 at its first.

        To be asked once an attempt.
        """
        self._attempts += 1
        before = self._last_of.get(self.stream)
        self._last_of[self.stream] = self._attempts
        return -1 if before is None else self._attempts - before

    def attempt(
        self, attempt: Attempt, numbers: Sequence[Tensor], rows: Sequence[Tensor], device: torch.device
    ) -> None:
        """Send an attempt with its numbers, in the order that `Attempt` gives; then statistics that are wanted by now.

        Arguments:
            numbers: those ahead of the statistics.
            rows: (n, WIDTH) float64, the statistics; they are kept for a while and not to be changed.
        """
        self._flight.keep(attempt.attempt, rows)
        sent = [*numbers, *(each.narrow(1, 0, len(SCALARS)) for each in rows)]
        ring = self._ring_on(device)
        if not self._is_ready and rows:
            self._is_ready = True
            ring.reserve(_sizes_ahead(sent, rows))
        if ring.send(sent, attempt):
            self.harvester.steps.sent = attempt.attempt
        else:
            self._outrun("attempts", attempt.attempt)
        self.harvester.advance(together=min(TOGETHER, self._flight.depth // 4))
        self._send_wanted(ring)

    def _send_wanted(self, ring: Ring[Label]) -> None:
        """More than one attempt's at a time, so that none is gone before its turn; few, so that no update is long."""
        for _ in range(AT_ONCE):
            wanted = self.harvester.next_wanted() if ring.bytes_in_flight < MOST_BYTES else None
            if wanted is None:
                return
            stop = 0
            for portion in _portions(self._flight.rows_of(wanted.attempt.attempt) or ()):
                start, stop = stop, stop + len(portion)
                if not ring.send([portion], Rows(wanted.of(slice(start, stop)))):
                    self._outrun("tensors", wanted.attempt.attempt, len(portion))
                self.harvester.advance()  # on the CPU it has arrived, and its memory is there for the next

    def seen(self, observations: Iterable[Observation], device: torch.device, attempt: int) -> None:
        """Send what observers have seen."""
        for seen in observations:
            label = Seen(seen.type, seen.decode, attempt, self.stream, self._clock())
            if not self._ring_on(device).send([seen.values], label):
                self._outrun("events", attempt)

    def event(self, type: str, **data: Any) -> None:
        """Record an event that only the host knows of, at the coming attempt."""
        attempt = self._registry.coming_attempt
        self.harvester.advance()  # it knows the step
        self._recorder.event(type, attempt=attempt, step=self.harvester.step, stream=self.stream, **data)

    def _outrun(self, kind: str, attempt: int, count: int = 1) -> None:
        """The ring is full: say what was lost."""
        where = {"first_attempt": attempt, "last_attempt": attempt, "count": count}
        self.event("dropped", kind=kind, **_OUTRUN, **where)

    def _ring_on(self, device: torch.device) -> Ring[Label]:
        if self._ring is None:
            self._ring = Ring(device, memory=self._memory)
            self.harvester.listen(self._ring)
        return self._ring


def _portions(rows: Iterable[Tensor]) -> Iterator[Tensor]:
    return (portion for each in rows for portion in torch.split(each, PORTION))


def _sizes_ahead(sent: Sequence[Tensor], rows: Sequence[Tensor]) -> list[int]:
    """Of vectors that will be under way together: attempts, and statistics up to what may be."""
    whole = sum(map(Tensor.numel, rows))
    autopsies = min(2 * AT_ONCE, max(1, MOST_BYTES // max(1, 8 * whole)))
    portions = [portion.numel() for portion in _portions(rows)]
    return [sum(map(Tensor.numel, sent))] * AHEAD + portions * autopsies


def _close(part: Closable) -> None:
    part.close()
