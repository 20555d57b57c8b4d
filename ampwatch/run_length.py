"""Run-length coding of events: a scaler at its floor says the same at every attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

from .records import Event

LONGEST_WAIT_S: Final = 10.0
MOST_TOLD: Final = 256

_Key: TypeAlias = tuple[str, int, int, bytes]


class Coder:
    """Codes events over the flushes of one producer: what only goes on with what was told waits, up to `LONGEST_WAIT_S`.

    It comes at once where anything new is to be told.

    Arguments:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[_Key, int] = {}  # the attempt behind the last that was told, of the last of them
        self._waiting: list[Event] = []
        self._since = 0.0

    @property
    def waiting(self) -> Sequence[Event]:
        """What waits."""
        return self._waiting

    @property
    def is_due(self) -> bool:
        """Whether something has waited long enough."""
        return bool(self._waiting) and self._clock() - self._since >= LONGEST_WAIT_S

    def code(self, events: Iterable[Event], *, final: bool = False) -> list[Event]:
        """What is to be told now, of these and what waits; everything if `final`."""
        self._since = self._since if self._waiting else self._clock()
        self._waiting = coded([*self._waiting, *events])
        if all(map(self._goes_on, self._waiting)) and not (final or self.is_due):
            return []
        told, self._waiting = self._waiting, []
        for event in told:
            self._told.pop(_key(event), None)  # to its end, as the oldest go first
            self._told[_key(event)] = _end(event)
        for key in list(self._told)[:-MOST_TOLD]:
            del self._told[key]
        return told

    def _goes_on(self, event: Event) -> bool:
        return event.attempt >= 0 and self._told.get(_key(event)) == event.attempt


def coded(events: Iterable[Event]) -> list[Event]:
    """The events, those alike at consecutive attempts as one that says how often, at the place of the first.

    Alike are type, step, stream and data to the last bit. Nothing is lost but the times of the repetitions, which
    the rows of these attempts hold.
    """
    kept: list[Event] = []
    last: dict[_Key, int] = {}
    for event in events:
        key = _key(event)
        place = last.get(key)
        if place is not None and event.attempt >= 0 and event.attempt == _end(kept[place]):
            kept[place] = msgspec.structs.replace(kept[place], repeat=kept[place].repeat + event.repeat)
        else:
            last[key] = len(kept)
            kept.append(event)
    return kept


def _key(event: Event) -> _Key:
    return event.type, event.step, event.stream, msgspec.msgpack.encode(event.data)


def _end(event: Event) -> int:
    return event.attempt + event.repeat
