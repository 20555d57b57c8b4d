"""Tombstones: what was given up, until a record of it has found a place that keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from .records import Batch, Event, Kind
from .spool_writer import Dropped


class Tombstones:
    """Adds up what was given up, by kind and reason: bounded, however long there is no room for anything."""

    def __init__(self) -> None:
        self._found: dict[tuple[Kind, str], Dropped] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, dropped: Iterable[Dropped]) -> None:
        """Take in what was given up."""
        for each in dropped:
            key = (each.kind, each.reason)
            self._found[key] = _both(self._found.get(key, each._replace(batches=0)), each)

    def holds(self, batch: Batch) -> bool:
        """Whether it is known already that this batch was given up."""
        return any(each.holds(batch) for each in self._found.values())

    def take(self) -> list[Dropped]:
        """All of it; what could not be recorded is added again."""
        found, self._found = list(self._found.values()), {}
        return found


def event(dropped: Dropped, time: float) -> Event:
    """The event that records it."""
    return Event("dropped", time, data=dropped._asdict())


def _both(one: Dropped, other: Dropped) -> Dropped:
    first, last = min(one.first_seq, other.first_seq), max(one.last_seq, other.last_seq)
    return one._replace(first_seq=first, last_seq=last, batches=one.batches + other.batches)
