"""A recorder in memory, and its records as tests read them."""

from __future__ import annotations

from typing import Any

import torch

import ampwatch
from ampwatch.logbook import Logbook
from ampwatch.records import Event, Table
from ampwatch.settings import Settings
from ampwatch.stats import cpu

torch.set_num_threads(1)

WORKING = ("reference", "cpu") if cpu.available() else ("reference",)
"""Implementations of the statistics pass that work on any machine."""


class MemoryRecorder:
    """What the training side needs of a `Recorder`, without thread, disk or network."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.finished = False
        self.predecessor = None
        self.producer = "0" * 32
        self.logbook = Logbook()
        self.description: dict[str, Any] = {}
        self.sources: list[Any] = []
        self.listeners: list[Any] = []
        self._attempts = 0
        self._events: list[Event] = []
        self._tables: list[Table] = []
        self._tensors: list[Table] = []

    def event(self, type: str, *, attempt: int = -1, step: int = -1, stream: int = -1, **data: Any) -> None:
        self._events.append(Event(type, 0.0, attempt, step, stream, data=data))

    def fault(self, where: str, error: Exception, count: int) -> None:
        self.event("fault", where=where, error=repr(error), count=count)

    def describe(self, **data: Any) -> None:
        self.description |= data

    def next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts - 1

    def attach(self, source: Any) -> None:
        self.sources.append(source)

    def listen(self, on_finding: Any) -> None:
        self.listeners.append(on_finding)

    def events(self, *types: str) -> list[Event]:
        """The events so far, those of these types if any are given."""
        self._harvest()
        return [event for event in self._events if not types or event.type in types]

    def data(self, type: str) -> list[dict[str, Any]]:
        """The data of the events of a type."""
        return [event.data for event in self.events(type)]

    def column(self, name: str) -> list[Any]:
        """A column of the attempts so far, over all scalers in the order of the attempts."""
        self._harvest()
        rows = [
            (attempt, value)
            for table in self._tables
            for attempt, value in zip(table["attempt"].tolist(), table[name].tolist(), strict=True)
        ]
        return [value for _, value in sorted(rows, key=lambda row: row[0])]

    def tensors(self, name: str) -> list[Any]:
        """A column of the tensor rows so far."""
        self._harvest()
        return [value for table in self._tensors for value in table[name].tolist()]

    def _harvest(self) -> None:
        for source in self.sources:
            harvest = source.harvest(final=True)
            self._events += harvest.events
            self._tables += [harvest.attempts] if harvest.attempts else []
            self._tensors += [harvest.tensors] if harvest.tensors else []


def scaler(recorder: MemoryRecorder, **arguments: Any) -> ampwatch.GradScaler:
    """A scaler on the CPU that records into memory."""
    return ampwatch.GradScaler("cpu", recorder=recorder, **arguments)
