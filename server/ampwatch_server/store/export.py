"""Exporting a run: every row as it was recorded, in parts that are read one by one.

Each part is read in a snapshot of its own and handed on when that is closed: whoever reads slowly holds no
transaction, so the write-ahead log can be checkpointed, and memory stays that of one part.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.records import COLUMNS, Array, Table, is_added, to_json_list
from ampwatch_server import tables as t
from ampwatch_server.db import Database

from . import codec
from .cover import Where, read_rows
from .events import list_events
from .processes import EVERYONE, Source, processes_of
from .tail import TailReader
from .windows import WINDOW

Format = Literal["csv", "json", "ndjson"]
Kind = Literal["attempts", "tensors", "events"]

EVENT_COLUMNS: Final = ("rank", "producer", "type", "time", "attempt", "step", "stream", "repeat", "data")
_CHUNKS: Final = 64  # whose names one snapshot reads
_EVENTS: Final = 1000
# a spreadsheet runs text that begins so as a formula; names come from training jobs
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_NUMBERS: Final = ("-Infinity",)


class Part(NamedTuple):
    """Some rows: the names of their columns, and the values as JSON has them."""

    names: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Asked(NamedTuple):
    """What to export: of whom, and which attempts of each producer, both ends inclusive."""

    kind: Kind
    source: Source = EVERYONE
    first: int = 0
    last: int | None = None


class Exporter:
    """Reads the rows of one run.

    Arguments:
        database, tails, run.
        asked: which rows.
    Errors: RunNotFound, here and not while reading.
    """

    def __init__(self, database: Database, tails: TailReader, run: str, asked: Asked) -> None:
        self._database, self._tails, self._run, self._asked = database, tails, run, asked
        with database.read() as connection:
            self._producers = processes_of(connection, run, asked.source)

    def write(self, form: Format) -> Iterator[bytes]:
        """The export, piece by piece."""
        if form == "csv":
            return _csv(self._header(), self._parts())
        return (
            _ndjson(self._parts()) if form == "ndjson" else _json(self._run, self._asked.kind, self._parts())
        )

    def _parts(self) -> Iterator[Part]:
        if self._asked.kind == "events":
            yield from self._events()
            return
        for producer in self._producers:
            yield from self._tables(producer)

    def _events(self) -> Iterator[Part]:
        cursor: str | None = ""
        limits = {"first": self._asked.first or None, "last": self._asked.last}
        while cursor is not None:
            with self._database.read() as connection:
                page = list_events(
                    connection,
                    self._run,
                    types=(),
                    source=self._asked.source,
                    cursor=cursor,
                    limit=_EVENTS,
                    **limits,
                )
            cursor = page["next"]
            yield Part(EVENT_COLUMNS, [tuple(e[name] for name in EVENT_COLUMNS) for e in page["items"]])

    def _tables(self, producer: Row[Any]) -> Iterator[Part]:
        names = self._names(producer)
        end = producer.end_attempt if self._asked.last is None else self._asked.last + 1
        for first, streams in sorted(self._windows(producer).items()):
            span = (max(first, self._asked.first), min(first + WINDOW, end))
            if span[0] < span[1]:
                with self._database.read() as connection:
                    tables = self._read(connection, producer, span, sorted(streams))
                yield from (_part(producer, table, names) for table in tables)

    def _windows(self, producer: Row[Any]) -> dict[int, set[int]]:
        """The windows in which a producer has rows, by their first attempt, each with its streams."""
        row = t.chunks.c
        mine = (row.producer == producer.id, row.kind == self._asked.kind, row.level == 0)
        found: dict[int, set[int]] = defaultdict(set)
        with self._database.read() as connection:
            for first, stream in connection.execute(sa.select(row.first, row.stream).where(*mine)):
                found[first].add(stream)
            tail = self._tails.read(connection, producer.id, self._asked.kind)
        for stream in tail.streams:
            for first in tail.touched(stream):
                found[first].add(stream)
        return found

    def _read(
        self, connection: Connection, producer: Row[Any], span: tuple[int, int], streams: list[int]
    ) -> list[Table]:
        kind = self._asked.kind
        tail = self._tails.read(connection, producer.id, kind)
        found = [read_rows(connection, Where(producer.id, kind, s), span, tail) for s in streams]
        return [table for table in found if table is not None]

    def _names(self, producer: Row[Any]) -> dict[int, str]:
        """Names of the tensors of a producer."""
        if self._asked.kind != "tensors":
            return {}
        query = sa.select(t.tensors.c.tensor, t.tensors.c.name).where(t.tensors.c.producer == producer.id)
        with self._database.read() as connection:
            return {row.tensor: row.name for row in connection.execute(query)}

    def _header(self) -> tuple[str, ...]:
        """Every column that any row may have: a CSV names them before the first."""
        if self._asked.kind == "events":
            return EVENT_COLUMNS
        known = tuple(COLUMNS[self._asked.kind])
        if self._asked.kind == "tensors":
            return ("rank", "producer", "name", *known, "lost_share")
        logged = {name for producer in self._producers for name in self._recorded(producer)}
        return ("rank", "producer", *known, *sorted(filter(is_added, logged)))

    def _recorded(self, producer: Row[Any]) -> Iterator[str]:
        """Names of the columns that a producer has recorded."""
        with self._database.read() as connection:
            tail = self._tails.read(connection, producer.id, "attempts")
        for table in tail.streams.values():
            yield from table
        mine = sa.and_(
            t.chunks.c.producer == producer.id, t.chunks.c.kind == "attempts", t.chunks.c.level == 0
        )
        place = sa.tuple_(t.chunks.c.stream, t.chunks.c.first)
        query = sa.select(t.chunks.c.stream, t.chunks.c.first, t.chunks.c.data).where(mine)
        after: tuple[int, int] | None = (-1, -1)
        while after is not None:
            next_ones = query.where(place > sa.tuple_(*map(sa.literal, after))).order_by("stream", "first")
            with self._database.read() as connection:
                rows = connection.execute(next_ones.limit(_CHUNKS)).all()
            for row in rows:
                yield from codec.names(row.data)
            after = (rows[-1].stream, rows[-1].first) if len(rows) == _CHUNKS else None


def _part(producer: Row[Any], table: Table, tensors: dict[int, str]) -> Part:
    n = len(table["attempt"])
    columns: dict[str, list[Any]] = {"rank": [producer.rank] * n, "producer": [producer.producer] * n}
    if "tensor" in table:
        columns["name"] = [tensors.get(i) or f"tensor {i}" for i in table["tensor"].tolist()]
    columns |= {name: _values(column) for name, column in table.items() if name != "seq"}
    return Part(tuple(columns), list(zip(*columns.values(), strict=True)))


def _values(column: Array) -> list[Any]:
    listed: list[Any] = column.tolist() if column.dtype.kind in "iu" else to_json_list(column)
    return listed


def _ndjson(parts: Iterable[Part]) -> Iterator[bytes]:
    for part in parts:
        yield b"".join(msgspec.json.encode(row) + b"\n" for row in _objects(part))


def _json(run: str, kind: Kind, parts: Iterable[Part]) -> Iterator[bytes]:
    yield b'{"run":%b,"kind":%b,"rows":[' % (msgspec.json.encode(run), msgspec.json.encode(kind))
    comma = b""
    for part in parts:
        if part.rows:
            yield comma + b",".join(map(msgspec.json.encode, _objects(part)))
            comma = b","
    yield b"]}\n"


def _objects(part: Part) -> Iterator[dict[str, Any]]:
    return (dict(zip(part.names, row, strict=True)) for row in part.rows)


def _csv(header: tuple[str, ...], parts: Iterable[Part]) -> Iterator[bytes]:
    yield _lines([header])
    for part in parts:
        place = [part.names.index(name) if name in part.names else None for name in header]
        yield _lines([_cell(row[i]) if i is not None else None for i in place] for row in part.rows)


def _lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA) and value not in _NUMBERS:
        return f"'{value}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value
