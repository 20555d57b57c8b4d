"""Deleting, in slices: whoever waits to write waits for one slice, not for gigabytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch_server.db import Database
from ampwatch_server.tables import chunks, events, inbox, parts, producers, receipts, tensors

SLICE_S: Final = 0.05
_FIRST: Final = 8  # rows, or pages
_MOST: Final = 4096
_OF_PRODUCERS: Final = (inbox, parts, chunks, events, tensors, receipts)


def never() -> bool:
    """Until it is done."""
    return False


def in_slices(
    database: Database, job: Callable[[Connection, int], int], stopped: Callable[[], bool] = never
) -> int:
    """Run `job(connection, limit)`, which answers how many it did, until it does fewer; answer their sum.

    The limit follows the clock, so that a slice takes at most about 50 ms.

    Arguments:
        stopped: asked after each slice whether that was the last.
    """
    done, limit = 0, _FIRST
    while True:
        count, seconds = database.write(partial(_timed, job, limit))
        done += count
        if count < limit or stopped():
            return done
        if seconds > SLICE_S / 2:
            limit = max(1, limit // 2)
        elif seconds < SLICE_S / 4:
            limit = min(_MOST, limit * 2)


def _timed(job: Callable[[Connection, int], int], limit: int, connection: Connection) -> tuple[int, float]:
    started = time.perf_counter()
    return job(connection, limit), time.perf_counter() - started


def delete_where(
    database: Database,
    table: sa.Table,
    *which: sa.ColumnElement[bool],
    stopped: Callable[[], bool] = never,
) -> int:
    """Delete the rows that fulfil all of `which`, in slices; answer how many there were."""
    key = list(table.primary_key)

    def job(connection: Connection, limit: int) -> int:
        some = sa.select(*key).where(*which).limit(limit)
        place = key[0] if len(key) == 1 else sa.tuple_(*key)
        return connection.execute(table.delete().where(place.in_(some))).rowcount

    return in_slices(database, job, stopped)


def empty_run(database: Database, run: str, stopped: Callable[[], bool] = never) -> None:
    """Delete all that grows with a run, in slices. Its row, and what hangs on that, is left for one last transaction."""
    with database.read() as connection:
        ids = connection.scalars(sa.select(producers.c.id).where(producers.c.run == run)).all()
    waits = sa.exists().where(inbox.c.producer == receipts.c.producer, inbox.c.seq == receipts.c.seq)
    for producer_id in ids:
        for table in _OF_PRODUCERS:
            # A batch that has come meanwhile keeps its receipt, or it would be taken for a new one if it came again.
            which = [table.c.producer == producer_id] + [~waits] * (table is receipts)
            if not stopped():
                delete_where(database, table, *which, stopped=stopped)


def give_back(database: Database, stopped: Callable[[], bool] = never) -> int:
    """Return the free pages of a SQLite file to the disk, in slices; answer how many. PostgreSQL does it by itself."""
    if database.url.get_backend_name() != "sqlite":
        return 0
    return in_slices(database, _vacuum, stopped)


def _vacuum(connection: Connection, limit: int) -> int:
    free = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    pages = min(int(free), limit)
    for _ in range(pages):  # SQLite frees a page a step, and Python's driver takes one step
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")
    return pages
