"""Leases: one server at a time folds and diagnoses a run, and keeps it while it lives and the run goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.errors import AmpwatchError

from .chore import Chore
from .db import Database
from .settings import Settings
from .tables import run_state

log = logging.getLogger(__name__)

# Without news for so long a run is left to whoever gets some: calm clients come every 20 s.
HELD_S: Final = 60.0
_RUNS_A_QUERY: Final = 400  # below the bound on variables of old SQLite
SKEW_S: Final = 60.0  # how far the clocks of servers on one database may differ


class LeaseLost(AmpwatchError):
    """Another server has taken the run over, or the run was deleted: what was being written is rolled back."""


@dataclass(frozen=True)
class Lease:
    """A claim of `holder` on a run, kept in the row of the run's state.

    Every transaction that changes what the lease protects begins with `assert_held`, which locks this row to its
    end: a server that slept through its lease cannot write over the next one.
    """

    run: str
    holder: str
    settings: Settings

    def renew(self, connection: Connection) -> bool:
        """Renew the lease; False where it is no longer ours, so that what we know of the run may be out of date."""
        return self._claim(connection, self.settings.clock(), run_state.c.holder == self.holder)

    def acquire(self, connection: Connection) -> bool:
        """Take or renew the lease; False where another server holds it, or the run is gone."""
        now = self.settings.clock()
        until = run_state.c.lease_until
        # given before the clock was set back: nobody waits it out
        never_ends = until > now + self.settings.lease_s + SKEW_S
        free = sa.or_(run_state.c.holder == self.holder, until < now, never_ends)
        return self._claim(connection, now, free)

    def assert_held(self, connection: Connection) -> None:
        """Renew the lease. LeaseLost where it has gone to another."""
        if not self.renew(connection):
            raise LeaseLost(f"run {self.run}: another server has taken it over, or it was deleted")

    def release(self, connection: Connection) -> None:
        """Give the lease back."""
        mine = run_state.update().where(run_state.c.run == self.run, run_state.c.holder == self.holder)
        connection.execute(mine.values(holder="", lease_until=0.0))

    def _claim(self, connection: Connection, now: float, allowed: sa.ColumnElement[bool]) -> bool:
        claim = run_state.update().where(run_state.c.run == self.run, allowed)
        done = connection.execute(claim.values(holder=self.holder, lease_until=now + self.settings.lease_s))
        return done.rowcount == 1


def _execute(connection: Connection, statement: sa.Executable) -> None:
    connection.execute(statement)


class Leases:
    """The runs that one server works on, whose leases it renews in a thread: during a pass, however long that takes, and
    for `HELD_S` after it. Otherwise servers behind a balancer would take each run from each other at every batch, and
    make its diagnosis anew.

    Arguments: database, settings, and the holder's name.
    """

    def __init__(self, database: Database, settings: Settings, holder: str) -> None:
        self._database, self._settings, self._holder = database, settings, holder
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}  # monotonic s, by run
        self._chore = Chore("leases", self.renew, settings.lease_s / 3)

    def start(self) -> None:
        """Begin to renew."""
        self._chore.start()

    def stop(self) -> None:
        """Renew no more, and give all leases back."""
        self._chore.stop()
        mine = run_state.update().where(run_state.c.holder == self._holder)
        self._database.write(lambda c: c.execute(mine.values(holder="", lease_until=0.0)))

    @contextmanager
    def held(self, lease: Lease) -> Iterator[None]:
        """A pass over a run whose lease was taken; one that fails leaves the run to whoever is quicker."""
        self._keep(lease.run, math.inf)
        try:
            yield
        except BaseException:
            with self._lock:
                del self._until[lease.run]
            raise
        self._keep(lease.run, time.monotonic() + HELD_S)

    def has(self, run: str) -> bool:
        """Whether this server works on a run, or did within `HELD_S`."""
        with self._lock:
            return self._until.get(run, -math.inf) > time.monotonic()

    def renew(self) -> None:
        """Renew the leases of all runs that are kept."""
        now = time.monotonic()
        with self._lock:
            self._until = {run: until for run, until in self._until.items() if until > now}
            kept = sorted(self._until)
        until = self._settings.clock() + self._settings.lease_s
        mine = run_state.update().where(run_state.c.holder == self._holder).values(lease_until=until)
        for start in range(0, len(kept), _RUNS_A_QUERY):
            some = run_state.c.run.in_(kept[start : start + _RUNS_A_QUERY])
            self._database.write(partial(_execute, statement=mine.where(some)))

    def _keep(self, run: str, until: float) -> None:
        with self._lock:
            self._until[run] = until
