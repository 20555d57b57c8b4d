"""Folding: tables that wait in the inbox become chunks of level 0, and chunks become those of the level above.

A window is folded once its producer has gone past it; what comes later is merged into it. With its chunk goes its
*part*: its points for the level above. No point lies in two windows, so the chunk of a parent is its parts one after
the other, each made of all rows of its window and never added to. When rows reach a window whose parent has its
chunk, that is taken apart again, and the part made anew. So batches that are late, repeated or out of order end in
the same chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Table

from .db import Database
from .lease import Lease
from .roll import above, roll
from .store import codec
from .store.codec import Encoded
from .store.cover import Where, level_points
from .store.place import Window, is_at, read_at, write_chunks, write_parts, written_codec
from .store.points import select
from .store.rows import by_stream, by_window, union
from .store.tail import Key, TailReader, Waiting, first_waiting, foldable, load
from .store.windows import MAX_ATTEMPT, TOP_LEVEL, WINDOW, floor_to, point_size, window_size
from .tables import chunks, inbox, parts, producers

BATCHES: Final = 256  # folded in one go, of bodies of …
FOLDED_BYTES: Final = 16 << 20  # … so much, unless one is larger: memory, and how long others wait to write


def fold(
    database: Database, tails: TailReader, lease: Lease, producer_id: int, given: set[Key], *, whole: bool
) -> int:
    """Fold what a producer has gone past, roll up the windows that are complete, and answer up to which attempt.

    A window into which something that waits will be folded is not complete: rolled up before, it would have to be taken
    apart again, window after window through a backlog.

    Arguments:
        tails: knows waiting batches decoded.
        given: what the diagnosis has seen. The rest waits on: what is folded is not given to it any more. What
            has been folded is taken out.
        whole: the producer has ended or fallen silent, so its last window is folded too.
    Errors: LeaseLost.
    """
    with database.read() as connection:
        row = connection.execute(_progress(producer_id)).one_or_none()
    if row is None:  # deleted meanwhile
        return 0
    edge = MAX_ATTEMPT if whole else floor_to(row.end_attempt, WINDOW)
    oldest = {"attempts": row.attempts_from, "tensors": row.tensors_from}
    while _fold_some(database, tails, lease, producer_id, given, edge, oldest):
        pass
    with database.read() as connection:
        end = min(int(row.end_attempt), first_waiting(connection, producer_id))
    roll(database, lease, producer_id, end)
    return end


def add_missing_parts(database: Database, lease: Lease, *which: sa.ColumnElement[bool]) -> None:
    """Make the parts that chunks of level 0 lack which were written before there were parts. LeaseLost.

    Arguments:
        which: conditions on `chunks`.
    """
    row = chunks.c
    with database.read() as connection:
        found = connection.execute(
            sa.select(row.producer, row.kind, row.stream, row.first).where(*which)
        ).all()
    for place in found:
        window = Window(Where(place.producer, place.kind, place.stream), 0, place.first)
        with database.read() as connection:
            if _has_points(connection, window):
                continue
            rows, version = read_at(connection, chunks, window), written_codec(connection)
        part = {above(window): _part(window, rows, version)} if rows is not None else {}

        def job(connection: Connection, part: dict[Window, Encoded] = part) -> None:
            lease.assert_held(connection)
            write_parts(connection, part)

        database.write(job)


def _has_points(connection: Connection, window: Window) -> bool:
    places = ((parts, above(window)), (chunks, _ancestor(window, 1)))
    return any(
        connection.execute(sa.select(table.c.first).where(is_at(table, p))).first() for table, p in places
    )


def _progress(producer_id: int) -> sa.Select[Any]:
    row = producers.c
    return sa.select(row.end_attempt, row.attempts_from, row.tensors_from).where(row.id == producer_id)


def _fold_some(
    database: Database,
    tails: TailReader,
    lease: Lease,
    producer_id: int,
    given: set[Key],
    edge: int,
    oldest: Mapping[str, int],
) -> bool:
    with database.read() as connection:
        unfolded = [each for each in foldable(connection, producer_id, edge) if each.key in given]
        if not unfolded:
            return False
        keys, edge = _some_of(unfolded, edge)
        waiting = load(connection, keys)
        found = _by_window(tails, waiting, edge, oldest)
        version = written_codec(connection)
        rows = {window: _merged(connection, window, tables) for window, tables in found.items()}
        kept = _unsealed(connection, rows, version)
    whole = {window: codec.encode(table, version) for window, table in rows.items()}
    counts = {window: len(table["attempt"]) for window, table in rows.items()}
    kept |= {above(window): _part(window, table, version) for window, table in rows.items()}
    gone = [row.seq for row in waiting if row.last < edge]
    partly = [row.seq for row in waiting if row.last >= edge]

    def job(connection: Connection) -> None:
        lease.assert_held(connection)
        _forget_ancestors(connection, whole)
        write_chunks(connection, whole, counts)
        write_parts(connection, kept)
        mine = inbox.c.producer == producer_id
        connection.execute(inbox.delete().where(mine, inbox.c.seq.in_(gone)))
        connection.execute(inbox.update().where(mine, inbox.c.seq.in_(partly)).values(folded=edge))
        lowest = min((window.first for window in whole), default=MAX_ATTEMPT)
        reset = producers.update().where(producers.c.id == producer_id, producers.c.rolled > lowest)
        connection.execute(reset.values(rolled=lowest))

    database.write(job)
    given.difference_update((producer_id, seq) for seq in gone)
    return len(keys) < len(unfolded)


def _some_of(unfolded: list[Waiting], edge: int) -> tuple[list[Key], int]:
    """The first that are folded in one go, and before which attempt: a window in which others lie waits for them."""
    size_bytes = np.cumsum([each.size_bytes for each in unfolded])
    count = min(BATCHES, max(1, int(np.searchsorted(size_bytes, FOLDED_BYTES, side="right"))))
    keys = [each.key for each in unfolded[:count]]
    if count == len(unfolded):
        return keys, edge
    shared = floor_to(min(each.first for each in unfolded[count:]), WINDOW)
    has_whole = shared > min(each.first for each in unfolded[:count])
    return keys, min(edge, shared) if has_whole else edge


def _by_window(
    tails: TailReader, waiting: Iterable[Any], edge: int, oldest: Mapping[str, int]
) -> dict[Window, list[Table]]:
    """The waiting rows by their windows. What comes so late that its window is gone by age is left out."""
    found: dict[Window, list[Table]] = defaultdict(list)
    for row in waiting:
        for stream, rows in by_stream(tails.decoded(row)):
            for first, part in by_window(rows):
                if max(row.folded, oldest[row.kind]) <= first < edge:
                    found[Window(Where(row.producer_id, row.kind, stream), 0, first)].append(part)
    return found


def _merged(connection: Connection, window: Window, tables: list[Table]) -> Table:
    stored = read_at(connection, chunks, window)
    rows = union(tables if stored is None else [*tables, stored])
    if rows is None:
        raise AssertionError("a window without rows is not folded")
    return rows


def _part(window: Window, rows: Table, version: int) -> Encoded:
    """The points of a window of level 0 for the level above."""
    return codec.encode(level_points(window.where.kind, rows, point_size(window.where.kind, 1)), version)


def _unsealed(connection: Connection, touched: Iterable[Window], version: int) -> dict[Window, Encoded]:
    """The parts of the ancestors of these windows that have chunks, but for those in which the windows lie."""
    found: dict[Window, Encoded] = {}
    stale = set(touched)
    for level in range(1, TOP_LEVEL + 1):
        ancestors = {_ancestor(window, level) for window in stale}
        for ancestor in ancestors:
            points = read_at(connection, chunks, ancestor)
            if points is not None:
                found |= _parts_of(ancestor, points, {w.first for w in stale}, version)
        stale = ancestors
    return found


def _parts_of(window: Window, points: Table, without: Set[int], version: int) -> dict[Window, Encoded]:
    size = window_size(window.level - 1)
    place = points["attempt"] // size * size
    return {
        window._replace(first=int(first)): codec.encode(select(points, place == first), version)
        for first in np.unique(place)
        if int(first) not in without
    }


def _ancestor(window: Window, level: int) -> Window:
    return window._replace(level=level, first=floor_to(window.first, window_size(level)))


def _forget_ancestors(connection: Connection, written: Iterable[Window]) -> None:
    """Delete the chunks above these windows, and the parts that those would have become."""
    for level in range(1, TOP_LEVEL + 1):
        for window in {_ancestor(window, level) for window in written}:
            connection.execute(chunks.delete().where(is_at(chunks, window)))
            connection.execute(parts.delete().where(is_at(parts, above(window))))
