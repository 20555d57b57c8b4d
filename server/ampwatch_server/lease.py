"""Leases: one server at a time folds and diagnoses a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.errors import AmpwatchError

from .settings import Settings
from .tables import run_state

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
