"""The parts of a server, put together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from .alerts import Alerts
from .auth import Auth
from .compactor import Compactor
from .db import Database
from .diagnoser import Engine
from .follow import Follower
from .inbox import Inbox
from .live import Hub, News
from .metrics import Labels, Metrics, gauges
from .recordings import Recordings
from .settings import Settings
from .store.runs import changed_since
from .store.tail import TailReader

SOON_S: Final = 1.0
CALM_S: Final = (10.0, 20.0)
YOUNG_S: Final = 120.0


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
            self.database, settings, self.tails, engine, self.hub.changed, self.alerts.note, self.metrics
        )
        self.inbox = Inbox(self.database, settings, self.compactor.announce)
        self._follower = (
            None if settings.directory is None else Follower(settings.directory, self.inbox, self.database)
        )

    def start(self) -> None:
        """Start the threads."""
        self.compactor.start()
        self.alerts.start()
        if self._follower is not None:
            self._follower.start()

    def stop(self) -> None:
        """Finish what is under way; what was acknowledged is on the disk already."""
        if self._follower is not None:
            self._follower.stop()
        self.compactor.stop()
        self.alerts.stop()
        self.database.close()

    def next_batch_s(self, run: str, first_seen: float, *, trouble: bool) -> float:
        """When a client should send again: soon while someone watches, the run is young or in trouble."""
        young = self.settings.clock() - first_seen < YOUNG_S
        if young or trouble or self.hub.watched(run):
            return SOON_S
        return round(random.uniform(*CALM_S), 2)  # so that a thousand ranks do not come at once

    def gauges(self) -> dict[tuple[str, Labels], float]:
        """What metrics tell of this process and of the database, beside what was counted."""
        writer = self.database.writer
        own: dict[tuple[str, Labels], float] = {
            ("ampwatch_commits_total", None): writer.commits,
            ("ampwatch_commit_seconds_total", None): writer.commit_s,
            ("ampwatch_writes_waiting", None): writer.waiting,
            ("ampwatch_lag_seconds", None): self.compactor.lag_s(),
            ("ampwatch_watchers", None): self.hub.watchers,
        }
        with self.database.read() as connection:
            return own | gauges(connection, self.settings)

    def _changed_since(self, since: float) -> News:
        with self.database.read() as connection:
            return changed_since(connection, self.settings, since)
