"""The parts of a server, put together."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from . import tables as t
from .alerts import Alerts
from .auth import Auth
from .compactor import Compactor
from .companion import Companion
from .db import Database, upsert
from .diagnoser import Engine
from .follow import Follower
from .handoff import Handoff
from .inbox import Inbox
from .live import SKEW_S, Hub, News
from .metrics import Labels, Metrics, gauges
from .rates import Rates
from .recordings import Recordings
from .retention import Retention
from .settings import Settings
from .store.blob import unpack
from .store.runs import changed_since
from .store.tail import TailReader

SOON_S: Final = 1.0
CALM_S: Final = (10.0, 20.0)
YOUNG_S: Final = 120.0
MOOD_S: Final = 1.0
READY_S: Final = 1.0
MOODS: Final = 10_000
WATCH_TOLD_S: Final = 5.0
WATCH_S: Final = 15.0  # how long the other servers believe that a run is watched


class _Mood(NamedTuple):
    """What decides how soon the clients of a run should come: when it began, and whether it is in trouble or watched."""

    until: float
    started: float
    trouble: bool
    watched: bool


class Service:
    """A server without its HTTP: the database, and the threads that work on it.

    Arguments:
        settings.
        engine: makes a diagnosis.
    Errors: AmpwatchError where the database cannot be opened.
    """

    def __init__(self, settings: Settings, engine: Callable[[], Engine]) -> None:
        self.settings = settings
        self.database = Database(settings.url)
        self.database.migrate()
        self.tails = TailReader()
        self.recordings = Recordings(self.database, self.tails)
        self.metrics = Metrics()
        self.auth = Auth(self.database, settings)
        self.hub = Hub(self._changed_since)
        self.link_opened: Callable[[], None] = lambda: None  # whoever prints links shows the next one
        self.alerts = Alerts(self.database, settings)
        self.compactor = Compactor(
            self.database, settings, self.tails, engine, self.hub.changed, self.alerts.note, self.metrics.add
        )
        self._worker: Compactor | Companion = self.compactor
        if settings.compactor == "process":
            self._worker = Companion(settings, self.hub.changed, self.metrics)
        self.inbox = Inbox(self.database, settings, self._worker.announce)
        self.handoff = Handoff()  # from the inbox's commits to the loop that answers
        self.retention = Retention(self.database, settings)
        self.token_rates = Rates(settings.token_per_s)
        self.producer_rates = Rates(settings.producer_per_s)
        self._moods: dict[str, _Mood] = {}
        self._watches_told = self._ready_until = float("-inf")
        self._follower = (
            None if settings.directory is None else Follower(settings.directory, self.inbox, self.database)
        )

    def start(self) -> None:
        """Start the threads."""
        self._worker.start()
        self.alerts.start()
        self.retention.start()
        if self._follower is not None:
            self._follower.start()

    def stop(self) -> None:
        """Finish what is under way; what was acknowledged is on the disk already."""
        if self._follower is not None:
            self._follower.stop()
        self._worker.stop()
        self.alerts.stop()
        self.retention.stop()
        self.database.close()

    def prove_ready(self) -> None:
        """Commit a transaction that writes, unless one was within a second: whoever asks needs no token.

        Errors: Unavailable.
        """
        if time.monotonic() < self._ready_until:
            return
        version = t.formats.c.version
        self.database.write(lambda connection: connection.execute(t.formats.update().values(version=version)))
        self._ready_until = time.monotonic() + READY_S

    def known_wait_s(self, run: str) -> float | None:
        """When a client should send again, where the database need not be asked for it."""
        known, now = self._moods.get(run), time.monotonic()
        if known is None:
            return None
        if known.until < now:  # one asks; whoever comes meanwhile is told what was known
            self._moods[run] = known._replace(until=now + MOOD_S)
            return None
        return self._wait_s(run, known)

    def look_up_wait_s(self, run: str) -> float:
        """When a client should send again."""
        state = t.run_state.c
        watch, now = t.watches.c, self.settings.clock()
        watched = sa.exists().where(watch.run.in_((run, "")), watch.until.between(*_believed(now)))
        query = sa.select(t.runs.c.started, state.verdict, watched.label("watched"))
        query = query.join(t.run_state, state.run == t.runs.c.run)
        with self.database.read() as connection:
            row = connection.execute(query.where(t.runs.c.run == run)).one_or_none()
        started = now if row is None else row.started  # None: deleted meanwhile
        trouble = row is not None and unpack(row.verdict).get("word") == "failing"
        mood = _Mood(time.monotonic() + MOOD_S, started, trouble, row is not None and row.watched)
        if len(self._moods) >= MOODS:
            self._moods.clear()
        self._moods[run] = mood
        return self._wait_s(run, mood)

    def _wait_s(self, run: str, mood: _Mood) -> float:
        """Soon while someone watches, the run is young or in trouble."""
        young = self.settings.clock() - mood.started < YOUNG_S
        if young or mood.trouble or mood.watched or self.hub.watched(run):
            return SOON_S
        return round(random.uniform(*CALM_S), 2)  # so that a thousand ranks do not come at once

    def gauges(self) -> dict[tuple[str, Labels], float]:
        """What metrics tell of this process and of the database, beside what was counted."""
        writer = self.database.writer
        own: dict[tuple[str, Labels], float] = {
            ("ampwatch_commits_total", None): writer.commits,
            ("ampwatch_commit_seconds_total", None): writer.commit_s,
            ("ampwatch_writes_waiting", None): writer.waiting,
            ("ampwatch_lag_seconds", None): self._worker.lag_s(),
            ("ampwatch_watchers", None): self.hub.watchers,
        }
        with self.database.read() as connection:
            return own | gauges(connection, self.settings)

    def _changed_since(self, since: float) -> News:
        self._tell_watches()
        with self.database.read() as connection:
            return changed_since(connection, self.settings, since)

    def _tell_watches(self) -> None:
        """Let the other servers know what is watched here. Not waited for: news are for reading, whatever the disk does."""
        if time.monotonic() < self._watches_told + WATCH_TOLD_S:
            return
        self._watches_told = time.monotonic()
        now = self.settings.clock()
        rows = [{"run": run, "until": now + WATCH_S} for run in sorted(self.hub.all_watched())]
        if rows:
            self.database.submit(lambda connection: _note_watches(connection, rows, now))


def _note_watches(connection: Connection, rows: list[dict[str, Any]], now: float) -> None:
    connection.execute(t.watches.delete().where(sa.not_(t.watches.c.until.between(*_believed(now)))))
    statement = upsert(connection, t.watches)
    again = statement.on_conflict_do_update(index_elements=["run"], set_={"until": statement.excluded.until})
    connection.execute(again, rows)


def _believed(now: float) -> tuple[float, float]:
    """Between which moments a watch may end: not over, nor from before the clock was set back; by another's clock."""
    return now - SKEW_S, now + WATCH_S + SKEW_S
