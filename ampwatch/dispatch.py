"""What one watch sends from the training thread: attempts and observations through the ring, events beside it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from .harvest import Harvester, Label, Seen
from .hooks import Observation
from .outcome import Attempt
from .registry import Registry, Sink
from .ring import Memory, Ring

_OUTRUN: Final = {"first_seq": -1, "last_seq": -1, "reason": "the device did not keep pace"}


class Closable(Protocol):
    """What a watch leaves behind: hooks, and numbers under way."""

    def close(self) -> None:
        """Nothing follows."""


def close_with(watch: object, *parts: Closable) -> None:
    """Close these when the watch is gone; not at interpreter exit, where the recorder still harvests."""
    weakref.finalize(watch, _close, parts).atexit = False


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
        self.harvester = Harvester(tensor_every=recorder.settings.tensor_every)
        self.stream = -1  # index, once there is one
        recorder.attach(self.harvester)

    def attempt(self, attempt: Attempt, numbers: Sequence[Tensor], device: torch.device) -> None:
        """Send an attempt with its numbers, in the order that `Attempt` gives."""
        if not self._ring_on(device).send(numbers, attempt):
            self._outrun("attempts", attempt.attempt)
        self.harvester.advance()

    def seen(self, observations: Iterable[Observation], device: torch.device, attempt: int) -> None:
        """Send what observers have seen."""
        for seen in observations:
            label = Seen(seen.type, seen.decode, attempt, self.stream, self._clock())
            if not self._ring_on(device).send([seen.values], label):
                self._outrun("events", attempt)

    def event(self, type: str, **data: Any) -> None:
        """Record an event that only the host knows of, at the coming attempt."""
        attempt = self._registry.coming_attempt
        self._recorder.event(type, attempt=attempt, step=self.harvester.step, stream=self.stream, **data)

    def _outrun(self, kind: str, attempt: int) -> None:
        """The ring is full: say what was lost."""
        where = {"first_attempt": attempt, "last_attempt": attempt, "count": 1}
        self.event("dropped", kind=kind, **_OUTRUN, **where)

    def _ring_on(self, device: torch.device) -> Ring[Label]:
        if self._ring is None:
            self._ring = Ring(device, memory=self._memory)
            self.harvester.listen(self._ring)
        return self._ring


def _close(parts: Iterable[Closable]) -> None:
    for part in parts:
        part.close()
