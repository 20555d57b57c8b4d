"""Cover: the points of a stream over a range, from the coarsest chunks that serve and the tail.

A range is covered from the top: chunks of the wanted level first; what they leave open (the last, unfinished
parent, and every window that has rows waiting in the tail) by the level below; and at last by rows. So a read
touches at most 15 chunks of each finer level, and never counts a row twice.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Table
from ampwatch_server.tables import chunks

from . import codec, stats
from .points import KEYS, columns_of, concat, from_rows, merge, select
from .rows import unique
from .tail import Tail
from .windows import floor_to, window_size

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
    first, end = floor_to(span[0], stride), -floor_to(-span[1], stride)
    wanted = columns_of(names, tensors=where.kind == "tensors") | ({"hist"} if hist else set())
    touched = tail.touched(where.stream)
    gaps, parts = [(first, end)], []
    for k in range(level, 0, -1):
        found, gaps = _take(connection, where, k, gaps, touched, wanted)
        parts += found
    rows = _rows(connection, where, gaps, names, tail, hist=hist)
    parts.append(_points(where.kind, _none(where.kind) if rows is None else rows, names, hist=hist))
    points = concat(parts)
    inside = (points["attempt"] >= first) & (points["attempt"] < end)
    return merge(select(points, inside), stride)


def read_rows(
    connection: Connection, where: Where, span: Span, tail: Tail, names: Collection[str] | None = None
) -> Table | None:
    """The rows of a span of attempts, each once, ordered; None where there are none."""
    needed = None if names is None else {*names, *KEYS}
    data = _chunk_data(connection, where, 0, span)
    tables = [codec.decode(found, needed) for _, found in data]
    if where.stream in tail.streams:
        waiting = tail.streams[where.stream]
        tables.append(waiting if needed is None else {n: c for n, c in waiting.items() if n in needed})
    if not tables:
        return None
    rows = unique(concat(tables))
    inside = (rows["attempt"] >= span[0]) & (rows["attempt"] < span[1])
    return select(rows, inside) if inside.any() else None


def streams_of(connection: Connection, producer_id: int, kind: str, tail: Tail) -> list[int]:
    """The streams that a producer has rows of."""
    query = sa.select(chunks.c.stream).distinct()
    query = query.where(chunks.c.producer == producer_id, chunks.c.kind == kind, chunks.c.level == 0)
    return sorted({*connection.scalars(query), *tail.streams})


def level_points(kind: str, rows: Table, stride: int) -> Table:
    """The points that chunks of level 1 hold, of rows of level 0: every column, and what is derived from them."""
    if kind == "tensors":
        return merge(_points(kind, rows, stats.NAMES, hist="hist" in rows), stride)
    names = [name for name in rows if name not in KEYS]
    return merge(from_rows(rows, names), stride)


def _points(kind: str, rows: Table, names: Collection[str], *, hist: bool) -> Table:
    points = from_rows(stats.derived(rows) if kind == "tensors" else rows, names)
    if not hist:
        points.pop("hist", None)
    return points


def _none(kind: str) -> Table:
    """A table without rows. Its points have every column, also one that no chunk has because nobody recorded it."""
    keys = ("attempt", "tensor") if kind == "tensors" else ("attempt",)
    return {key: np.empty(0, np.int64) for key in keys}


def _take(
    connection: Connection, where: Where, level: int, gaps: list[Span], touched: list[int], wanted: set[str]
) -> tuple[list[Table], list[Span]]:
    """The chunks of one level inside the gaps, and the gaps that stay."""
    size, parts, left = window_size(level), [], []
    for gap in gaps:
        position = gap[0]
        for first, data in _chunk_data(connection, where, level, gap):
            if _any_between(touched, first, first + size):
                continue
            points = codec.decode(data, wanted)
            inside = (points["attempt"] >= gap[0]) & (points["attempt"] < gap[1])
            parts.append(select(points, inside))
            if first > position:
                left.append((position, first))
            position = first + size
        if position < gap[1]:
            left.append((position, gap[1]))
    return parts, left


def _rows(
    connection: Connection, where: Where, gaps: list[Span], names: Collection[str], tail: Tail, *, hist: bool
) -> Table | None:
    needed = _inputs(names) if where.kind == "tensors" else set(names)
    found = [read_rows(connection, where, gap, tail, needed | ({"hist"} if hist else set())) for gap in gaps]
    tables = [table for table in found if table is not None]
    return concat(tables) if tables else None


def _inputs(names: Collection[str]) -> set[str]:
    """The stored columns that statistics are derived from."""
    raw = {"scale", "numel", "n_inf", "n_nan", "n_zero", "n_subnormal", "max_abs", "sum_sq", "lost_share"}
    return raw | set(names)


def _chunk_data(connection: Connection, where: Where, level: int, span: Span) -> list[tuple[int, bytes]]:
    """First attempt and data of the chunks that overlap a span, ascending."""
    query = sa.select(chunks.c.first, chunks.c.data).where(
        chunks.c.producer == where.producer_id,
        chunks.c.kind == where.kind,
        chunks.c.stream == where.stream,
        chunks.c.level == level,
        chunks.c.first >= floor_to(span[0], window_size(level)),
        chunks.c.first < span[1],
    )
    return [(first, data) for first, data in connection.execute(query.order_by(chunks.c.first))]


def _any_between(ascending: list[int], low: int, high: int) -> bool:
    place = np.searchsorted(ascending, low)
    return bool(place < len(ascending) and ascending[place] < high)
