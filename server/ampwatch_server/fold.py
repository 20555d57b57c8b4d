"""Folding: tables that wait in the inbox become chunks of level 0, and chunks become those of the level above.

A window is folded once its producer has gone past it; what comes later is merged into it. Levels above are
*recomputed* from all their children, never added to: when rows reach a window, its ancestors are deleted in the
same transaction, and made anew from what the window holds now. So batches that are late, repeated or out of
order end in the same chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Table

from .db import Database, upsert
from .lease import Lease
from .store import codec
from .store.cover import Where, level_points
from .store.points import concat, merge
from .store.rows import by_stream, by_window, union
from .store.tail import Key, batch_of, decode, foldable, load
from .store.windows import MAX_ATTEMPT, TOP_LEVEL, WINDOW, floor_to, point_size, window_size
from .tables import chunks, inbox, producers

BATCHES: Final = 256  # folded in one go


class Window(NamedTuple):
    """Place of a chunk."""

    where: Where
    level: int
    first: int


def fold(database: Database, lease: Lease, producer_id: int, given: Set[Key], *, whole: bool) -> None:
    """Fold what a producer has gone past, and roll up the windows that are complete.

    Arguments:
        given: what the diagnosis has seen. The rest waits on: what is folded is not given to it any more.
        whole: the producer has ended or fallen silent, so its last window is folded too.
    Errors: LeaseLost.
    """
    with database.read() as connection:
        end = connection.execute(
            sa.select(producers.c.end_attempt).where(producers.c.id == producer_id)
        ).scalar()
    if end is None:  # deleted meanwhile
        return
    edge = MAX_ATTEMPT if whole else floor_to(end, WINDOW)
    while _fold_some(database, lease, producer_id, given, edge):
        pass
    _roll(database, lease, producer_id, end)


def _fold_some(database: Database, lease: Lease, producer_id: int, given: Set[Key], edge: int) -> bool:
    with database.read() as connection:
        keys = [key for key in foldable(connection, producer_id, edge) if key in given][:BATCHES]
        if not keys:
            return False
        waiting = load(connection, keys)
        parts = _by_window(waiting, edge)
        written = {window: _packed(_merged(connection, window, tables)) for window, tables in parts.items()}
    gone = [row.seq for row in waiting if row.last < edge]
    partly = [row.seq for row in waiting if row.last >= edge]

    def job(connection: Connection) -> None:
        lease.assert_held(connection)
        _write(connection, written)
        _forget_ancestors(connection, written)
        mine = inbox.c.producer == producer_id
        connection.execute(inbox.delete().where(mine, inbox.c.seq.in_(gone)))
        connection.execute(inbox.update().where(mine, inbox.c.seq.in_(partly)).values(folded=edge))
        lowest = min((window.first for window in written), default=MAX_ATTEMPT)
        reset = producers.update().where(producers.c.id == producer_id, producers.c.rolled > lowest)
        connection.execute(reset.values(rolled=lowest))

    database.write(job)
    return len(waiting) == BATCHES


def _by_window(waiting: Iterable[Any], edge: int) -> dict[Window, list[Table]]:
    found: dict[Window, list[Table]] = defaultdict(list)
    for row in waiting:
        for stream, rows in by_stream(decode(batch_of(row))):
            for first, part in by_window(rows):
                if row.folded <= first < edge:
                    found[Window(Where(row.producer_id, row.kind, stream), 0, first)].append(part)
    return found


def _merged(connection: Connection, window: Window, tables: list[Table]) -> Table:
    data = connection.execute(sa.select(chunks.c.data).where(_is(window))).scalar()
    rows = union([*tables, codec.decode(data)] if data is not None else tables)
    if rows is None:
        raise AssertionError("a window without rows is not folded")
    return rows


def _roll(database: Database, lease: Lease, producer_id: int, end: int) -> None:
    """Make the chunks above level 0 whose windows lie before `end` and which are missing."""
    for level in range(1, TOP_LEVEL + 1):
        with database.read() as connection:
            missing = _missing_parents(connection, producer_id, level, end)
        for window in missing:
            _roll_one(database, lease, window)

    def job(connection: Connection) -> None:
        lease.assert_held(connection)
        connection.execute(producers.update().where(producers.c.id == producer_id).values(rolled=end))

    database.write(job)


def _missing_parents(connection: Connection, producer_id: int, level: int, end: int) -> list[Window]:
    size = window_size(level)
    rolled = connection.execute(sa.select(producers.c.rolled).where(producers.c.id == producer_id)).scalar()
    if rolled is None:
        return []
    begin = floor_to(rolled, size)
    query = sa.select(chunks.c.kind, chunks.c.stream, chunks.c.level, chunks.c.first).where(
        chunks.c.producer == producer_id,
        chunks.c.level.in_((level - 1, level)),
        chunks.c.first >= begin,
        chunks.c.first < floor_to(end, size),
    )
    there: set[Window] = set()
    wanted: set[Window] = set()
    for kind, stream, found_level, first in connection.execute(query):
        window = Window(Where(producer_id, kind, stream), level, floor_to(first, size))
        (there if found_level == level else wanted).add(window)
    return sorted(wanted - there)


def _roll_one(database: Database, lease: Lease, window: Window) -> None:
    where, level, first = window
    query = sa.select(chunks.c.data).where(
        chunks.c.producer == where.producer_id,
        chunks.c.kind == where.kind,
        chunks.c.stream == where.stream,
        chunks.c.level == level - 1,
        chunks.c.first >= first,
        chunks.c.first < first + window_size(level),
    )
    with database.read() as connection:
        children = [codec.decode(data) for data in connection.scalars(query.order_by(chunks.c.first))]
    stride = point_size(where.kind, level)
    if level == 1:
        points = concat([level_points(where.kind, rows, stride) for rows in children])
    else:
        points = concat(children)
    written = {window: _packed(merge(points, stride))}

    def job(connection: Connection) -> None:
        lease.assert_held(connection)
        _write(connection, written)

    database.write(job)


def _packed(table: Table) -> dict[str, Any]:
    return {"count": len(table["attempt"]), "codec": codec.CODEC, "data": codec.encode(table)}


def _write(connection: Connection, written: dict[Window, dict[str, Any]]) -> None:
    for window, values in written.items():
        place = {**window.where._asdict(), "level": window.level, "first": window.first}
        place["producer"] = place.pop("producer_id")
        statement = upsert(connection, chunks).values(**place, **values)
        connection.execute(statement.on_conflict_do_update(index_elements=list(place), set_=values))


def _forget_ancestors(connection: Connection, written: Iterable[Window]) -> None:
    above = {
        Window(window.where, level, floor_to(window.first, window_size(level)))
        for window in written
        for level in range(1, TOP_LEVEL + 1)
    }
    for window in above:
        connection.execute(chunks.delete().where(_is(window)))


def _is(window: Window) -> sa.ColumnElement[bool]:
    where = window.where
    return sa.and_(
        chunks.c.producer == where.producer_id,
        chunks.c.kind == where.kind,
        chunks.c.stream == where.stream,
        chunks.c.level == window.level,
        chunks.c.first == window.first,
    )
