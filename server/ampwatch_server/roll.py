"""Rolling up: the parts of a window that is complete become its chunk, and its own part for the level above."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Table

from .db import Database
from .lease import Lease
from .store import codec
from .store.cover import Where, level_points
from .store.place import Window, write_chunks, write_parts, written_codec
from .store.points import concat, merge
from .store.windows import TOP_LEVEL, floor_to, point_size, window_size
from .tables import chunks, parts, producers


def roll(database: Database, lease: Lease, producer_id: int, end: int) -> None:
    """Make the chunks above level 0 whose windows lie before `end` and which are missing. LeaseLost."""
    with database.read() as connection:
        rolled = connection.execute(
            sa.select(producers.c.rolled).where(producers.c.id == producer_id)
        ).scalar()
    if rolled is None:  # deleted meanwhile
        return
    for level in range(1, TOP_LEVEL + 1):
        size = window_size(level)
        if floor_to(rolled, size) == floor_to(end, size):  # nor is any window above complete
            return
        with database.read() as connection:
            missing = _missing_parents(connection, producer_id, level, rolled, end)
        for window in missing:
            _roll_one(database, lease, window)


def above(window: Window) -> Window:
    """Place of the part of a window."""
    return window._replace(level=window.level + 1)


def _missing_parents(
    connection: Connection, producer_id: int, level: int, rolled: int, end: int
) -> list[Window]:
    begin = floor_to(rolled, window_size(level))
    there = _windows(connection, chunks, producer_id, level, level, begin, end)
    children = _windows(connection, chunks, producer_id, level, level - 1, begin, end)
    waiting = _windows(connection, parts, producer_id, level, level, begin, end)
    return sorted((children | waiting) - there)


def _windows(
    connection: Connection, table: sa.Table, producer_id: int, level: int, of: int, begin: int, end: int
) -> set[Window]:
    """The windows of `level`, complete before `end`, in which something of level `of` lies."""
    row, size = table.c, window_size(level)
    query = sa.select(row.kind, row.stream, row.first).where(
        row.producer == producer_id, row.level == of, row.first >= begin, row.first < floor_to(end, size)
    )
    return {
        Window(Where(producer_id, kind, stream), level, floor_to(first, size))
        for kind, stream, first in connection.execute(query)
    }


def _roll_one(database: Database, lease: Lease, window: Window) -> None:
    where, level, _ = window
    with database.read() as connection:
        version = written_codec(connection)
        found = dict(_inside(connection, parts, window, level))
        for first, child in _inside(connection, chunks, window, level - 1, without=found):
            found[first] = _points(where.kind, level, child)
    points = merge(concat([found[first] for first in sorted(found)]), point_size(where.kind, level))
    chunk, count = codec.encode(points, version), len(points["attempt"])
    part = None
    if level < TOP_LEVEL:
        part = codec.encode(merge(points, point_size(where.kind, level + 1)), version)

    def job(connection: Connection) -> None:
        lease.assert_held(connection)
        write_chunks(connection, {window: chunk}, {window: count})
        if part is not None:
            write_parts(connection, {above(window): part})
        connection.execute(parts.delete().where(_is_inside(parts, window, level)))

    database.write(job)


def _points(kind: str, level: int, child: Table) -> Table:
    """The part of a chunk that has none: it was written before there were parts."""
    stride = point_size(kind, level)
    return level_points(kind, child, stride) if level == 1 else merge(child, stride)


def _inside(
    connection: Connection, table: sa.Table, window: Window, level: int, without: Any = ()
) -> list[tuple[int, Table]]:
    """First attempt and columns of what lies inside a window, on a level."""
    inside = _is_inside(table, window, level)
    firsts = connection.scalars(sa.select(table.c.first).where(inside)).all()
    wanted = [first for first in firsts if first not in without]
    query = sa.select(table.c.first, table.c.data, table.c.hist).where(inside, table.c.first.in_(wanted))
    rows = connection.execute(query) if wanted else ()
    return [(first, codec.decode(data, None, hist)) for first, data, hist in rows]


def _is_inside(table: sa.Table, window: Window, level: int) -> sa.ColumnElement[bool]:
    where, row = window.where, table.c
    return sa.and_(
        row.producer == where.producer_id,
        row.kind == where.kind,
        row.stream == where.stream,
        row.level == level,
        row.first >= window.first,
        row.first < window.first + window_size(window.level),
    )
