"""Cover: the points of a stream over a range, from the coarsest chunks that serve and the tail.

A range is covered from the top: chunks of the wanted level first; what they leave open (the last, unfinished
parent, and every window that has rows waiting in the tail) by that parent's parts; then the same on the level
below; and at last by rows. So a read touches at most 15 parts of each level, and never counts a row twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Table
from ampwatch_server.tables import chunks, parts

from . import codec, stats
from .points import KEYS, PARTS, columns_of, concat, from_rows, merge, select, summarise
from .rows import unique
from .tail import Tail
from .windows import WINDOW, floor_to, point_size, window_size

Span = tuple[int, int]


class Where(NamedTuple):
    """One stream of one producer, in attempts or in tensors."""

    producer_id: int
    kind: str
    stream: int


def read_points(
    connection: Connection,
    where: Where,
    span: Span,
    level: int,
    stride: int,
    names: Collection[str],
    tail: Tail,
    *,
    hist: bool = False,
) -> Table:
    """Points of `stride` attempts over the attempts of `span`, from chunks of at most `level`.

    The span is widened to whole points. `stride` is a multiple of `point_size(kind, level)`. With `hist` the
    points of tensors carry the sum of their histograms.
    """
    whole = _widened(span, stride)
    wanted = columns_of(names, tensors=where.kind == "tensors") | ({"hist"} if hist else set())
    points = concat(_cover(connection, where, whole, level, wanted, _Shown(names, PARTS, hist), tail))
    inside = (points["attempt"] >= whole[0]) & (points["attempt"] < whole[1])
    return merge(points if inside.all() else select(points, inside), stride)


def read_cells(
    connection: Connection,
    where: Where,
    span: Span,
    level: int,
    stride: int,
    name: str,
    part: str,
    tail: Tail,
) -> list[Table]:
    """One part of one statistic of all tensors, as `read_points` has it before points are merged, and no labels."""
    wanted, shown = {"attempt", "tensor", f"{name}:{part}"}, _Shown([name], [part], hist=False)
    return _columns(connection, where, _widened(span, stride), level, wanted, shown, tail)


def read_labels(
    connection: Connection, where: Where, span: Span, level: int, labels: Collection[str], tail: Tail
) -> list[Table]:
    """The labels of points over a span, before points are merged, and the attempt at which each begins."""
    wanted, shown = {"attempt", *labels}, _Shown([], [], hist=False)
    whole = _widened(span, point_size(where.kind, level))
    return _columns(connection, where, whole, level, wanted, shown, tail)


def _columns(
    connection: Connection,
    where: Where,
    span: Span,
    level: int,
    wanted: set[str],
    shown: _Shown,
    tail: Tail,
) -> list[Table]:
    """Some columns of what covers a span, of no attempt beyond it."""
    found = []
    for table in _cover(connection, where, span, level, wanted, shown, tail):
        inside = (table["attempt"] >= span[0]) & (table["attempt"] < span[1])
        columns = {key: table[key] for key in wanted if key in table}
        found.append(columns if inside.all() else select(columns, inside))
    return found


def _widened(span: Span, stride: int) -> Span:
    return floor_to(span[0], stride), -floor_to(-span[1], stride)


def _cover(
    connection: Connection,
    where: Where,
    span: Span,
    level: int,
    wanted: set[str],
    shown: _Shown,
    tail: Tail,
) -> list[Table]:
    """Tables of points that cover a span, and may go beyond it."""
    touched = tail.touched(where.stream)
    gaps, found = [span], []
    for k in range(level, 0, -1):
        for table, size in ((chunks, window_size(k)), (parts, window_size(k - 1))):
            taken, gaps = _take(connection, table, size, where, k, gaps, touched, wanted)
            found += taken
    rows = _rows(connection, where, gaps, shown, tail)
    found.append(_points(where.kind, _none(where.kind) if rows is None else rows, shown))
    return found


def read_rows(
    connection: Connection, where: Where, span: Span, tail: Tail, names: Collection[str] | None = None
) -> Table | None:
    """The rows of a span of attempts, each once, in order (of tensors: window by window); None without any."""
    needed = None if names is None else {*names, *KEYS}
    tables = [rows for _, rows in _read(connection, chunks, WINDOW, where, 0, span, needed)]
    waiting = _waiting(tail, where.stream, span, needed)
    if not tables and waiting is None:
        return None
    rows = concat(tables) if waiting is None else unique(concat([*tables, waiting]))
    inside = (rows["attempt"] >= span[0]) & (rows["attempt"] < span[1])
    if inside.all():
        return rows
    return select(rows, inside) if inside.any() else None


def _waiting(tail: Tail, stream: int, span: Span, needed: Collection[str] | None) -> Table | None:
    """The rows of the tail inside a span; None where there are none."""
    if stream not in tail.streams:
        return None
    rows = {n: c for n, c in tail.streams[stream].items() if needed is None or n in needed}
    inside = (rows["attempt"] >= span[0]) & (rows["attempt"] < span[1])
    return select(rows, inside) if inside.any() else None


def streams_of(connection: Connection, producer_id: int, kind: str, tail: Tail) -> list[int]:
    """The streams that a producer has rows of."""
    mine = {"producer_id": producer_id, "kind": kind}
    found = {*tail.streams, *connection.scalars(_STREAMS, mine)}
    return sorted(found)


def level_points(kind: str, rows: Table, stride: int) -> Table:
    """The points that chunks of level 1 hold, of rows of level 0: every column, and what is derived from them."""
    names = stats.NAMES if kind == "tensors" else [name for name in rows if name not in KEYS]
    return summarise(stats.derived(rows, names) if kind == "tensors" else rows, names, stride)


class _Shown(NamedTuple):
    """What points shall carry."""

    names: Collection[str]
    only: Sequence[str]
    hist: bool


def _points(kind: str, rows: Table, shown: _Shown) -> Table:
    known = stats.derived(rows, shown.names) if kind == "tensors" else rows
    points = from_rows(known, shown.names, shown.only)
    if not shown.hist:
        points.pop("hist", None)
    return points


def _none(kind: str) -> Table:
    """A table without rows. Its points have every column, also one that no chunk has because nobody recorded it."""
    keys = ("attempt", "tensor") if kind == "tensors" else ("attempt",)
    return {key: np.empty(0, np.int64) for key in keys}


def _take(
    connection: Connection,
    table: sa.Table,
    size: int,
    where: Where,
    level: int,
    gaps: list[Span],
    touched: list[int],
    wanted: set[str],
) -> tuple[list[Table], list[Span]]:
    """The points of one level, in windows of `size` attempts, inside the gaps; and the gaps that stay."""
    found, left = [], []
    for gap in gaps:
        position = gap[0]
        for first, points in _read(connection, table, size, where, level, gap, wanted):
            if _any_between(touched, first, first + size):
                continue
            if first < gap[0] or first + size > gap[1]:
                points = select(points, (points["attempt"] >= gap[0]) & (points["attempt"] < gap[1]))
            found.append(points)
            if first > position:
                left.append((position, first))
            position = first + size
        if position < gap[1]:
            left.append((position, gap[1]))
    return found, left


def _rows(connection: Connection, where: Where, gaps: list[Span], shown: _Shown, tail: Tail) -> Table | None:
    needed = stats.inputs_of(shown.names) if where.kind == "tensors" else set(shown.names)
    needed |= {"hist"} if shown.hist else set()
    found = [read_rows(connection, where, gap, tail, needed) for gap in gaps]
    tables = [table for table in found if table is not None]
    return concat(tables) if tables else None


def _read(
    connection: Connection,
    table: sa.Table,
    size: int,
    where: Where,
    level: int,
    span: Span,
    names: Collection[str] | None,
) -> Iterator[tuple[int, Table]]:
    """First attempt and columns of the windows of `size` attempts that overlap a span, ascending."""
    place = {"level": level, "low": floor_to(span[0], size), "end": span[1]}
    query = _QUERIES[table.name, names is None or "hist" in names]
    rows = connection.execute(query, where._asdict() | place).all()
    return ((first, codec.decode(data, names, hist)) for first, data, hist in rows)


def _query(table: sa.Table, *, hist: bool) -> sa.Select[Any]:
    """What `_read` asks; made once, since to make it costs more than to ask."""
    row = table.c
    return (
        sa.select(row.first, row.data, row.hist if hist else sa.null())
        .where(
            row.producer == sa.bindparam("producer_id"),
            row.kind == sa.bindparam("kind"),
            row.stream == sa.bindparam("stream"),
            row.level == sa.bindparam("level"),
            row.first >= sa.bindparam("low"),
            row.first < sa.bindparam("end"),
        )
        .order_by(row.first)
    )


_STREAMS: Final = sa.union(
    *(
        sa.select(table.c.stream).where(
            table.c.producer == sa.bindparam("producer_id"), table.c.kind == sa.bindparam("kind")
        )
        for table in (chunks, parts)
    )
)
_QUERIES: Final = {
    (table.name, hist): _query(table, hist=hist) for table in (chunks, parts) for hist in (False, True)
}


def _any_between(ascending: list[int], low: int, high: int) -> bool:
    place = np.searchsorted(ascending, low)
    return bool(place < len(ascending) and ascending[place] < high)
