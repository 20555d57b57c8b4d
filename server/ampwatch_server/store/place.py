"""Places of chunks and parts, and writing there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch_server.db import upsert
from ampwatch_server.tables import chunks, formats, parts

from . import codec
from .cover import Where


class Window(NamedTuple):
    """Place of a chunk, or of a part: the points of `level` of one window of the level below."""

    where: Where
    level: int
    first: int


def is_at(table: sa.Table, window: Window) -> sa.ColumnElement[bool]:
    """Whether a row of `chunks` or `parts` has this place."""
    return sa.and_(*(table.c[name] == value for name, value in _key(window).items()))


def write_chunks(connection: Connection, data: Mapping[Window, bytes], counts: Mapping[Window, int]) -> None:
    """Put chunks in the place of those before. `counts`: their rows."""
    rows = [row | {"count": counts[w]} for w, row in zip(data, _rows(connection, data), strict=True)]
    _replace(connection, chunks, rows)


def write_parts(connection: Connection, data: Mapping[Window, bytes]) -> None:
    """Put parts in the place of those before."""
    _replace(connection, parts, _rows(connection, data))


def _rows(connection: Connection, data: Mapping[Window, bytes]) -> list[dict[str, Any]]:
    """The rows of what `codec.encode` made, in the codec that every server on this database reads."""
    written = sa.select(formats.c.version).where(formats.c.name == "chunks")
    version = min(connection.execute(written).scalar_one(), codec.CODEC) if data else codec.CODEC
    if version < codec.CODEC:
        data = {window: codec.encode_first(codec.decode(each)) for window, each in data.items()}
    return [_key(window) | {"codec": version, "data": each} for window, each in data.items()]


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
