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
from .processes import EVERYONE, Source, require_run

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
    source: Source = EVERYONE,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """A page of events, the oldest first. RunNotFound.

    Arguments:
        types: only these; all where empty.
        first, last: attempts, both inclusive; an event that is repeated over some of them is among the answers.
    """
    require_run(connection, run)
    query = query_events(run).order_by(t.events.c.time, t.events.c.id)
    if types:
        query = query.where(t.events.c.type.in_([text(name) for name in types]))
    if first is not None:
        query = query.where(ends() >= first)
    if last is not None:
        query = query.where(t.events.c.attempt <= last)
    query = query.where(source.among(t.producers.c.rank, t.producers.c.producer))
    after = read_cursor(cursor, (float, int))
    if after is not None:
        query = query.where(sa.tuple_(t.events.c.time, t.events.c.id) > sa.tuple_(*map(sa.literal, after)))
    rows = connection.execute(query.limit(limit + 1)).all()
    page = rows[:limit]
    following = write_cursor((page[-1].time, page[-1].id)) if len(rows) > limit else None
    return {
        "items": [shown(row) for row in page],
        "next": following,
    }


def query_events(run: str) -> sa.Select[Any]:
    """The events of a run, with what `shown` needs."""
    joined = t.events.join(t.producers, t.producers.c.id == t.events.c.producer)
    columns = (t.events.c.id, t.events.c.time, t.events.c.body, t.producers.c.rank, t.producers.c.producer)
    return sa.select(*columns).select_from(joined).where(t.events.c.run == run)


def ends() -> sa.ColumnElement[int]:
    """The attempt of the last repetition of an event; of one that an older server has stored, of the first."""
    return sa.func.coalesce(t.events.c.last, t.events.c.attempt)


def shown(row: sa.Row[Any]) -> dict[str, Any]:
    """A row of `query_events` as `Event`."""
    event = _DEFAULTS | jsonable(unpack(row.body))
    key = {"id": row.id, "rank": row.rank, "producer": row.producer}
    return key | {name: event[name] for name in _DEFAULTS}
