"""Counters of a server, as Prometheus text."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.engine import Connection

from . import tables as t
from .db import used_bytes
from .settings import Settings
from .store.runs import status_now

_HELP = {
    "ampwatch_batches_total": ("counter", "Batches by what became of them."),
    "ampwatch_batch_bytes_total": ("counter", "Bytes of the bodies of stored batches."),
    "ampwatch_attempts_total": ("counter", "Attempts in stored batches."),
    "ampwatch_ingest_seconds_total": ("counter", "Time from a whole body to its durable commit, summed."),
    "ampwatch_commits_total": ("counter", "Transactions of the writing thread."),
    "ampwatch_commit_seconds_total": ("counter", "Time in them, from begin to durable commit, summed."),
    "ampwatch_dropped_total": (
        "counter",
        "Batches, and rows and events that were in none yet, that training jobs had to drop, by reason.",
    ),
    "ampwatch_compactor_restarts_total": (
        "counter",
        "Times that the compactor's process ended by itself and another was started.",
    ),
    "ampwatch_inbox_batches": ("gauge", "Acknowledged batches that are not in chunks or rows yet."),
    "ampwatch_lag_seconds": (
        "gauge",
        "How long the oldest news of this server has waited to become visible.",
    ),
    "ampwatch_writes_waiting": ("gauge", "Transactions that wait for the writing thread."),
    "ampwatch_watchers": ("gauge", "Event streams that are open on this server."),
    "ampwatch_alerts_waiting": ("gauge", "Alerts in the outbox that are not sent yet."),
    "ampwatch_database_bytes": ("gauge", "Size of the database, as retention measures it."),
    "ampwatch_runs": ("gauge", "Runs by status."),
}
NAMES = tuple(_HELP)
Labels = tuple[str, str] | None
_MOST_LABELS = 64  # of one counter: reasons come from training jobs


class Metrics:
    """What this process has counted since it started. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[tuple[str, Labels]] = Counter()

    def add(self, name: str, value: float = 1, label: Labels = None) -> None:
        """Add to a counter. Beyond so many labels of one counter the rest are one, `other`."""
        with self._lock:
            if label is not None and (name, label) not in self._values:
                many = sum(known == name for known, _ in self._values) >= _MOST_LABELS
                label = (label[0], "other") if many else label
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
    alerts = connection.execute(select(func.count(t.outbox.c.due))).scalar_one()
    found: dict[tuple[str, Labels], float] = {
        ("ampwatch_inbox_batches", None): waiting,
        ("ampwatch_alerts_waiting", None): alerts,
        ("ampwatch_database_bytes", None): used_bytes(connection),
    }
    return found | {("ampwatch_runs", ("status", name)): count for name, count in by_status}


def _braces(label: Labels) -> str:
    if label is None:
        return ""
    value = label[1].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{{{label[0]}="{value}"}}'
