"""Reading events: those that are rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch_server import tables as t
from ampwatch_server.db import text

from .blob import jsonable, unpack
from .paging import read_cursor, write_cursor
from .runs import require_run

_JOINED: Final = t.events.join(t.producers, t.producers.c.id == t.events.c.producer)
# what msgpack leaves out of an event, in the order of docs/rest.md
_DEFAULTS: Final[dict[str, Any]] = {
    "type": "",
    "time": None,
    "attempt": -1,
    "step": -1,
    "stream": -1,
    "repeat": 1,
    "data": {},
}


def list_events(
    connection: Connection,
    run: str,
    *,
    types: Sequence[str],
    first: int | None,
    last: int | None,
    rank: int | None,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """A page of events, the oldest first. RunNotFound.

    Arguments:
        types: only these; all where empty.
        first, last: attempts, both inclusive.
    """
    require_run(connection, run)
    query = _query(run).where(*_chosen(types, first, last, rank)).order_by(t.events.c.time, t.events.c.id)
    after = read_cursor(cursor, (float, int))
    if after is not None:
        query = query.where(sa.tuple_(t.events.c.time, t.events.c.id) > sa.tuple_(*map(sa.literal, after)))
    rows = connection.execute(query.limit(limit + 1)).all()
    page = rows[:limit]
    following = write_cursor((page[-1].time, page[-1].id)) if len(rows) > limit else None
    return {
        "items": [_event(row.id, row.rank, row.producer, unpack(row.body)) for row in page],
        "next": following,
    }


def list_marks(
    connection: Connection,
    run: str,
    *,
    types: Sequence[str],
    first: int | None,
    last: int | None,
    rank: int | None,
    most: int,
) -> list[dict[str, Any]]:
    """Events for a plot, in about `most` marks. RunNotFound.

    Each event stands for itself while there are no more. Else those of one type and producer within equal stretches
    of attempts share a mark: the first of them, with `count`, how many there are, and `last_attempt`. None is left out.

    Arguments:
        types: only these.
        first, last: attempts, both inclusive.
    """
    require_run(connection, run)
    event = t.events.c
    mine = (event.run == run, *_chosen(types, first, last, rank))
    bounds = sa.select(sa.func.count(), sa.func.min(event.attempt), sa.func.max(event.attempt))
    total, low, high = connection.execute(bounds.select_from(_JOINED).where(*mine)).one()
    width = 1 if total <= most else -(-(high - low + 1) * len(types) // most)
    key = event.id if total <= most else (event.attempt - low) // width
    groups = (
        sa.select(
            sa.func.min(event.id).label("id"),
            sa.func.count().label("number"),
            sa.func.max(event.attempt).label("last_attempt"),
        )
        .select_from(_JOINED)
        .where(*mine)
        .group_by(event.type, event.producer, key)
        .subquery()
    )
    query = (
        _query(run).add_columns(groups.c.number, groups.c.last_attempt).join(groups, groups.c.id == event.id)
    )
    return [
        _event(row.id, row.rank, row.producer, unpack(row.body))
        | {"count": row.number, "last_attempt": row.last_attempt}
        for row in connection.execute(query.order_by(event.time, event.id))
    ]


def _chosen(
    types: Sequence[str], first: int | None, last: int | None, rank: int | None
) -> list[sa.ColumnElement[bool]]:
    chosen: list[sa.ColumnElement[bool]] = []
    if types:
        chosen.append(t.events.c.type.in_([text(name) for name in types]))
    if first is not None:
        chosen.append(t.events.c.attempt >= first)
    if last is not None:
        chosen.append(t.events.c.attempt <= last)
    if rank is not None:
        chosen.append(t.producers.c.rank == rank)
    return chosen


def _query(run: str) -> sa.Select[Any]:
    columns = (t.events.c.id, t.events.c.time, t.events.c.body, t.producers.c.rank, t.producers.c.producer)
    return sa.select(*columns).select_from(_JOINED).where(t.events.c.run == run)


def _event(key: int, rank: int, producer: str, event: dict[str, Any]) -> dict[str, Any]:
    shown = _DEFAULTS | jsonable(event)
    return {"id": key, "rank": rank, "producer": producer} | {name: shown[name] for name in _DEFAULTS}
