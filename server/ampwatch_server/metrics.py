"""Counters of a server, as Prometheus text."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.engine import Connection

from . import tables as t
from .settings import Settings
from .store.runs import status_now

_HELP = {
    "ampwatch_batches_total": ("counter", "Batches by what became of them."),
    "ampwatch_batch_bytes_total": ("counter", "Bytes of the bodies of stored batches."),
    "ampwatch_ingest_seconds_total": ("counter", "Time from a whole body to its durable commit, summed."),
    "ampwatch_inbox_batches": ("gauge", "Acknowledged batches that are not in chunks or rows yet."),
    "ampwatch_runs": ("gauge", "Runs by status."),
}
Labels = tuple[str, str] | None


class Metrics:
    """What this process has counted since it started. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, Labels]] = Counter()

    def add(self, name: str, value: float = 1, label: Labels = None) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name, label] += value  # type: ignore[assignment]

    def text(self, gauges: Mapping[tuple[str, Labels], float]) -> str:
        """Counters and the given gauges in the text format of Prometheus."""
        with self._lock:
            values = {**self._values, **gauges}
        lines = []
        for name, (kind, told) in _HELP.items():
            lines += [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
            lines += [
                f"{name}{_braces(label)} {value:g}" for (key, label), value in values.items() if key == name
            ]
        return "\n".join(lines) + "\n"


def gauges(connection: Connection, settings: Settings) -> dict[tuple[str, Labels], float]:
    """What is counted in the database, over all servers."""
    waiting = connection.execute(select(func.count()).select_from(t.inbox)).scalar_one()
    status = status_now(settings).label("status")
    by_status = connection.execute(select(status, func.count()).group_by(status))
    found: dict[tuple[str, Labels], float] = {("ampwatch_inbox_batches", None): waiting}
    return found | {("ampwatch_runs", ("status", name)): count for name, count in by_status}


def _braces(label: Labels) -> str:
    return "" if label is None else f'{{{label[0]}="{label[1]}"}}'
