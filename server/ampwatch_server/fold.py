"""Folding: tables that wait in the inbox become chunks of level 0, and chunks become those of the level above.

A window is folded once its producer has gone past it; what comes later is merged into it. With its chunk goes its
*part*: its points for the level above. No point lies in two windows, so the chunk of a parent is its parts one after
the other, each made of all rows of its window and never added to. When rows reach a window whose parent has its
chunk, that is taken apart again, and the part made anew. So batches that are late, repeated or out of order end in
the same chunks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.records import Array, Table

from .db import Database
from .lease import Lease
from .roll import above, roll
from .store import codec
from .store.codec import Encoded
from .store.cover import Where, level_points
from .store.place import Window, forget, is_at, read_at, write_chunks, write_parts, written_codec
from .store.points import concat, select
from .store.rows import by_stream, by_window, union
from .store.tail import Key, TailReader, Waiting, first_waiting, foldable, load
from .store.windows import MAX_ATTEMPT, TOP_LEVEL, WINDOW, floor_to, point_size, window_size
from .tables import chunks, inbox, parts, producers

BATCHES: Final = 256  # folded in one go, of bodies of …
FOLDED_BYTES: Final = 16 << 20  # … so much, unless one is larger: memory, and how long others wait to write
LOCKED_S: Final = 0.05  # a transaction that has lasted so long is committed: what is left goes into the next


@dataclass(frozen=True)
class _Folded:
    """Some batches of a producer, folded and not yet written.

    Arguments:
        chunks, parts: to be written. `counts`: the rows of each chunk.
        gone: keys of the batches all of whose rows are in chunks. `partly`: of those whose rows before `edge` are.
        size_bytes: of the bodies of all of them.
        is_last: nothing else of the producer is to be folded.
    """

    producer_id: int
    chunks: dict[Window, Encoded]
    counts: dict[Window, int]
    parts: dict[Window, Encoded]
    gone: list[Key]
    partly: list[Key]
    edge: int
    size_bytes: int
    is_last: bool

    def write(self, connection: Connection) -> None:
        _forget_ancestors(connection, self.chunks)
        write_chunks(connection, self.chunks, self.counts)
        write_parts(connection, self.parts)
        mine = inbox.c.producer == self.producer_id
        gone, partly = ([seq for _, seq in keys] for keys in (self.gone, self.partly))
        connection.execute(inbox.delete().where(mine, inbox.c.seq.in_(gone)))
        connection.execute(inbox.update().where(mine, inbox.c.seq.in_(partly)).values(folded=self.edge))
        lowest = min((window.first for window in self.chunks), default=MAX_ATTEMPT)
        reset = producers.update().where(producers.c.id == self.producer_id, producers.c.rolled > lowest)
        connection.execute(reset.values(rolled=lowest))


def fold(
    database: Database,
    tails: TailReader,
    lease: Lease,
    rows: Sequence[Row[Any]],
    given: dict[Key, Array | None],
    read: dict[Key, Row[Any]],
) -> dict[int, int]:
    """Fold what producers of a run have gone past, roll up the windows that are complete, and answer up to which
    attempt each is.

    A window into which something that waits will be folded is not complete: rolled up before, it would have to be taken
    apart again, window after window through a backlog.

    Arguments:
        tails: knows waiting batches decoded.
        rows: of the producers, read under this lease: `id`, `end_attempt`, `attempts_from`, `tensors_from`, and
            `whole`: it has ended or fallen silent, so its last window is folded too.
        given: what the diagnosis has seen, of tensors with `stats.fitted`. The rest waits on: what is folded is not
            given to it any more. What has been folded is taken out.
        read: what of it was read under this lease and need not be again, rows of `BATCH_COLUMNS`. What is used is
            taken out, as the row changes where a part of it is folded.
    Errors: LeaseLost.
    """
    group: list[_Folded] = []
    size_bytes = 0
    last_seqs = dict(sorted(given))  # of each producer the highest
    for row in rows:
        edge = MAX_ATTEMPT if row.whole else floor_to(row.end_attempt, WINDOW)
        oldest = {"attempts": row.attempts_from, "tensors": row.tensors_from}
        newest = (row.id, last_seqs.get(row.id, -1))
        while (some := _fold_some(database, tails, newest, given, read, edge, oldest)) is not None:
            group.append(some)
            size_bytes += some.size_bytes
            if not some.is_last or len(group) >= BATCHES or size_bytes >= FOLDED_BYTES:
                _write(database, lease, group, given)
                group, size_bytes = [], 0
            if some.is_last:
                break
    _write(database, lease, group, given)
    with database.read() as connection:
        ends = {row.id: min(int(row.end_attempt), first_waiting(connection, row.id)) for row in rows}
    for producer_id, end in ends.items():
        roll(database, lease, producer_id, end)
    return ends


def _write(
    database: Database, lease: Lease, group: Sequence[_Folded], given: dict[Key, Array | None]
) -> None:
    """Write these in as few transactions as `LOCKED_S` allows: each commit waits for the disk."""

    def job(connection: Connection) -> int:
        began, count = time.monotonic(), 0
        lease.assert_held(connection)
        while count < len(group) and (count == 0 or time.monotonic() < began + LOCKED_S):
            group[count].write(connection)
            count += 1
        return count

    while group:
        count = database.write(job)
        for each in group[:count]:
            for key in each.gone:
                given.pop(key, None)
        group = group[count:]


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


def _fold_some(
    database: Database,
    tails: TailReader,
    newest: Key,
    given: Mapping[Key, Array | None],
    read: dict[Key, Row[Any]],
    edge: int,
    oldest: Mapping[str, int],
) -> _Folded | None:
    """The first of what waits of a producer up to the newest that was given, folded; None where nothing is to be."""
    producer_id, last_seq = newest
    with database.read() as connection:
        unfolded = [each for each in foldable(connection, producer_id, edge, last_seq) if each.key in given]
        if not unfolded:
            return None
        keys, edge = _some_of(unfolded, edge)
        known = {key: read.pop(key) for key in keys if key in read}
        waiting = [*known.values(), *load(connection, [key for key in keys if key not in known])]
        found = _by_window(tails, waiting, given, edge, oldest)
        version = written_codec(connection)
        rows = {window: _merged(connection, window, tables) for window, tables in found.items()}
        kept = _unsealed(connection, rows, version)
    return _Folded(
        producer_id,
        chunks={window: codec.encode(table, version) for window, table in rows.items()},
        counts={window: len(table["attempt"]) for window, table in rows.items()},
        parts=kept | {above(window): _part(window, table, version) for window, table in rows.items()},
        gone=[(producer_id, row.seq) for row in waiting if row.last < edge],
        partly=[(producer_id, row.seq) for row in waiting if row.last >= edge],
        edge=edge,
        size_bytes=sum(each.size_bytes for each in unfolded[: len(keys)]),
        is_last=len(keys) == len(unfolded),
    )


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
    tails: TailReader,
    waiting: Iterable[Any],
    given: Mapping[Key, Array | None],
    edge: int,
    oldest: Mapping[str, int],
) -> dict[Window, list[Table]]:
    """The waiting rows by their windows. What comes so late that its window is gone by age is left out."""
    alike: dict[tuple[Any, ...], list[Table]] = defaultdict(
        list
    )  # split together: the columns are those of each
    for row in waiting:
        table = tails.decoded(row, given[row.producer_id, row.seq])
        alike[row.producer_id, row.kind, max(row.folded, oldest[row.kind]), _form(table)].append(table)
    found: dict[Window, list[Table]] = defaultdict(list)
    for (producer_id, kind, begin, _), tables in alike.items():
        for stream, rows in by_stream(concat(tables)):
            for first, part in by_window(rows):
                if begin <= first < edge:
                    found[Window(Where(producer_id, kind, stream), 0, first)].append(part)
    return found


def _form(table: Table) -> tuple[tuple[str, str], ...]:
    return tuple((name, column.dtype.str) for name, column in table.items())


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
    places = {_ancestor(window, level) for window in written for level in range(1, TOP_LEVEL + 1)}
    forget(connection, chunks, places)
    forget(connection, parts, {above(place) for place in places})
