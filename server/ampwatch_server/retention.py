"""Retention: what is dropped by age, and when the database grows too large. On by default; says what it will do.

Only runs that nobody has heard of for a while are touched, the longest silent first. Of them the rows of tensors go
first, then those of attempts, and the levels above stay; events and the rest go last, with the whole run, and only
where the database is too large.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from . import tables as t
from .chore import Chore
from .db import Database, used_bytes
from .fold import add_missing_parts
from .lease import Lease, LeaseLost
from .settings import Keep, Settings
from .store.removal import delete_where, empty_run, give_back
from .store.runs import touch
from .store.windows import WINDOW

log = logging.getLogger(__name__)

EVERY_S: Final = 3600.0
SILENT_S: Final = 3600.0  # what was heard of since is not touched, however large the database is
_DAY_S: Final = 86400.0

What = Literal["tensors", "attempts", "run"]
_STAGES: Final[tuple[What, ...]] = ("tensors", "attempts", "run")


class Drop(NamedTuple):
    """Something to be dropped: the rows of tensors or attempts of a run, or the whole of it, and why."""

    run: str
    what: What
    why: Literal["age", "size"]


class Retention:
    """Drops what `settings.keep` does not keep, once an hour in a thread of its own, or when it is told to.

    Arguments: database, settings.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._holder = uuid.uuid4().hex
        self._chore = Chore("retention", self._tell_pruned, EVERY_S)

    def start(self) -> None:
        """Begin to work."""
        log.info("%s", told(self._settings.keep))
        self._chore.start()

    def stop(self) -> None:
        """End after the slice under way."""
        self._chore.stop()

    def due(self) -> list[Drop]:
        """What would be dropped now."""
        found = self._by_age()
        with self._database.read() as connection:
            excess = self._excess(connection)
        return found + (
            [d for d in self._by_size() if d._replace(why="age") not in found] if excess > 0 else []
        )

    def prune(self) -> list[Drop]:
        """Drop what is due, and give its place on the disk back; answer what was dropped."""
        done = [drop for drop in self._by_age() if self._perform(drop)]
        for drop in self._by_size():
            with self._database.read() as connection:
                if self._excess(connection) <= 0:
                    break
            done += [drop] if self._perform(drop) else []
        give_back(self._database, self._chore.is_stopping)
        return done

    def _tell_pruned(self) -> None:
        for drop in self.prune():
            log.info("run %s: dropped %s by %s", drop.run, drop.what, drop.why)

    def _by_age(self) -> list[Drop]:
        keep = self._settings.keep
        days: dict[What, float | None] = {"tensors": keep.tensors_days, "attempts": keep.attempts_days}
        return [
            Drop(run, what, "age")
            for what, limit in days.items()
            if limit is not None
            for run in self._having(what, max(limit * _DAY_S, SILENT_S))
        ]

    def _by_size(self) -> Iterator[Drop]:
        if self._settings.keep.max_bytes is not None:
            for what in _STAGES:
                yield from (Drop(run, what, "size") for run in self._having(what, SILENT_S))

    def _excess(self, connection: Connection) -> int:
        limit = self._settings.keep.max_bytes
        return 0 if limit is None else used_bytes(connection, limit) - limit

    def _having(self, what: What, silent_s: float) -> list[str]:
        """Runs of which nothing was received for so long that still have rows of a kind, the longest silent first.

        What was recorded long ago and comes today, from a folder or by `ampwatch sync`, is as old as its coming.
        """
        heard = sa.func.coalesce(t.runs.c.received, t.runs.c.last_seen)
        query = (
            sa.select(t.runs.c.run)
            .where(heard < self._settings.clock() - silent_s)
            .order_by(heard, t.runs.c.run)
        )
        if what != "run":
            its = (t.producers.c.run == t.runs.c.run, t.chunks.c.producer == t.producers.c.id)
            query = query.where(sa.exists().where(*its, *_old_rows(what)))
        with self._database.read() as connection:
            return list(connection.scalars(query))

    def _perform(self, drop: Drop) -> bool:
        """Drop it, unless a server works on the run; False where we are told to stop before it is done."""
        lease = Lease(drop.run, self._holder, self._settings)
        if self._chore.is_stopping() or not self._database.write(lease.acquire):
            return False
        try:
            if drop.what == "run":
                self._remove(lease)
            else:
                self._drop_rows(lease, drop.what)
        except LeaseLost as lost:
            log.info("%s", lost)
            return False
        self._database.write(lease.release)
        return not self._chore.is_stopping()

    def _remove(self, lease: Lease) -> None:
        empty_run(self._database, lease.run, self._chore.is_stopping)
        if self._chore.is_stopping():
            return
        self._database.write(lambda c: c.execute(t.runs.delete().where(t.runs.c.run == lease.run)))

    def _drop_rows(self, lease: Lease, kind: Literal["tensors", "attempts"]) -> None:
        """The last window of each producer stays, so that what comes after a long sleep finds its place."""
        query = sa.select(t.producers.c.id, _last_window().label("edge"))
        with self._database.read() as connection:
            producers = connection.execute(query.where(t.producers.c.run == lease.run)).all()
        for producer in producers:
            self._drop_of(lease, producer, kind)

    def _drop_of(self, lease: Lease, producer: Row[Any], kind: Literal["tensors", "attempts"]) -> None:
        """First the mark: from then on reads take the points above, and rows that come late are left out."""
        gone = (t.chunks.c.producer == producer.id, *_old_rows(kind, producer.edge))
        add_missing_parts(self._database, lease, *gone)

        def mark(connection: Connection) -> None:
            lease.assert_held(connection)
            mine = t.producers.update().where(t.producers.c.id == producer.id)
            connection.execute(mine.values({f"{kind}_from": producer.edge}))
            touch(connection, lease.run)  # what a client has cached of it is old

        self._database.write(mark)
        delete_where(self._database, t.chunks, *gone, stopped=self._chore.is_stopping)


def told(keep: Keep) -> str:
    """What will be dropped and when, in a sentence."""
    parts = [
        f"rows of {what} {days:g} days after their run was last heard of"
        for what, days in (("tensors", keep.tensors_days), ("attempts", keep.attempts_days))
        if days is not None
    ]
    if keep.max_bytes is not None:
        parts.append(f"above {keep.max_bytes / 2**30:g} GiB the same sooner, and whole runs last")
    return f"retention drops {'; '.join(parts)}" if parts else "retention drops nothing"


def _last_window() -> sa.ColumnElement[int]:
    end = t.producers.c.end_attempt
    return end - end % WINDOW


def _old_rows(kind: str, edge: int | None = None) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions on `chunks`: rows of a kind before `edge`, or before the last window of their producer."""
    row = t.chunks.c
    return row.kind == kind, row.level == 0, row.first < (_last_window() if edge is None else edge)
