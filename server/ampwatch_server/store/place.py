"""Places of chunks and parts, and reading and writing there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Table
from ampwatch_server.db import upsert
from ampwatch_server.tables import chunks, formats, parts

from . import codec
from .codec import Encoded
from .cover import Where


class Window(NamedTuple):
    """Place of a chunk, or of a part: the points of `level` of one window of the level below."""

    where: Where
    level: int
    first: int


def is_at(table: sa.Table, window: Window) -> sa.ColumnElement[bool]:
    """Whether a row of `chunks` or `parts` has this place."""
    return sa.and_(*(table.c[name] == value for name, value in _key(window).items()))


def read_at(
    connection: Connection, table: sa.Table, window: Window, names: Collection[str] | None = None
) -> Table | None:
    """The chunk or part of this place, or those columns of it; None where there is none."""
    query = _READS[table.name, names is None or "hist" in names]
    row = connection.execute(query, _key(window)).one_or_none()
    return None if row is None else codec.decode(row[0], names, row[1])


def written_codec(connection: Connection) -> int:
    """The newest codec that every server on this database reads."""
    written = sa.select(formats.c.version).where(formats.c.name == "chunks")
    return min(int(connection.execute(written).scalar_one()), codec.CODEC)


def write_chunks(
    connection: Connection, data: Mapping[Window, Encoded], counts: Mapping[Window, int]
) -> None:
    """Put chunks in the place of those before. `counts`: their rows."""
    rows = [row | {"count": counts[w]} for w, row in zip(data, _rows(data), strict=True)]
    _replace(connection, chunks, rows)


def write_parts(connection: Connection, data: Mapping[Window, Encoded]) -> None:
    """Put parts in the place of those before."""
    _replace(connection, parts, _rows(data))


def forget(connection: Connection, table: sa.Table, windows: Collection[Window]) -> None:
    """Delete what `chunks` or `parts` has at these places."""
    if windows:
        connection.execute(_DELETES[table.name], [_key(window) for window in windows])


def _rows(data: Mapping[Window, Encoded]) -> list[dict[str, Any]]:
    return [_key(window) | each._asdict() for window, each in data.items()]


def _replace(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    statement = upsert(connection, table)
    values = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    key = [c.name for c in table.primary_key]
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=values), rows)


def _key(window: Window) -> dict[str, Any]:
    where, level, first = window
    place = {"kind": where.kind, "stream": where.stream, "level": level, "first": first}
    return {"producer": where.producer_id} | place


# made once: to make them costs more than to ask
_PLACE: Final = ("producer", "kind", "stream", "level", "first")
_AT: Final = {
    table: sa.and_(*(table.c[name] == sa.bindparam(name) for name in _PLACE)) for table in (chunks, parts)
}
_READS: Final = {
    (table.name, hist): sa.select(table.c.data, table.c.hist if hist else sa.null()).where(at)
    for table, at in _AT.items()
    for hist in (False, True)
}
_DELETES: Final = {table.name: table.delete().where(at) for table, at in _AT.items()}
