"""A bounded queue between the training thread and the recorder's: what is given up is counted and told."""

from __future__ import annotations

import time
from collections import deque
from typing import Generic, TypeVar

from .records import Event

Item = TypeVar("Item")


class Backlog(Generic[Item]):
    """Keeps items in order up to a total weight; beyond it the oldest goes. Not thread-safe.

    Arguments:
        kind: of the records, for the `dropped` event.
        most: the total weight up to which all are kept; one item is kept whatever it weighs.
    """

    def __init__(self, kind: str, most: int) -> None:
        self._kind, self._most = kind, most
        self._items: deque[tuple[Item, int, int, int]] = deque()
        self._weight = 0
        self._lost = 0
        self._first_lost = self._last_lost = -1

    def put(self, item: Item, attempt: int, weight: int = 1, *, records: int = 1) -> None:
        """Add an item of an attempt, which is so many records."""
        self._items.append((item, attempt, weight, records))
        self._weight += weight
        while self._weight > self._most and len(self._items) > 1:
            _, lost, lost_weight, lost_records = self._items.popleft()
            self._weight -= lost_weight
            self._first_lost = lost if not self._lost else self._first_lost
            self._last_lost = lost
            self._lost += lost_records

    def __len__(self) -> int:
        return len(self._items)

    def take(self, most: int | None = None) -> tuple[list[Item], list[Event]]:
        """The oldest items, and the event that tells what was given up since the last call, if anything was.

        Arguments:
            most: the weight that is not exceeded, but by a single item; None takes all.
        """
        items, taken = list[Item](), 0
        while self._items and (most is None or not items or taken + self._items[0][2] <= most):
            item, _, weight, _ = self._items.popleft()
            items.append(item)
            taken += weight
        self._weight -= taken
        lost, self._lost = self._lost, 0
        return items, [self._dropped(lost)] if lost else []

    def _dropped(self, count: int) -> Event:
        data = {
            "kind": self._kind,
            "first_seq": -1,
            "last_seq": -1,
            "reason": "the recorder did not keep pace",
        }
        attempts = {"first_attempt": self._first_lost, "last_attempt": self._last_lost, "count": count}
        return Event("dropped", time.time(), data=data | attempts)
