"""Events for a plot: each by itself while there are few, those that stand close together where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch_server.tables import events

from .events import query_events, shown
from .processes import placed, require_run


def list_marks(
    connection: Connection,
    run: str,
    *,
    types: Sequence[str],
    first: int,
    last: int | None,
    rank: int | None,
    most: int,
) -> list[dict[str, Any]]:
    """The events of some types in about `most` marks. RunNotFound.

    Where there are more, those of one type and producer within equal stretches of attempts share a mark: the first of
    them, with `count`, how many there are, and `last_attempt`. None is left out.

    Arguments:
        first, last: attempts, both inclusive, counted through the processes of a rank.
    """
    require_run(connection, run)
    chosen, joined = _chosen(run, types, first, last, rank)
    bounds = sa.select(sa.func.count(), sa.func.min(events.c.attempt), sa.func.max(events.c.attempt))
    total, low, high = connection.execute(bounds.select_from(joined).where(*chosen)).one()
    if total <= most:
        key = events.c.id
    else:
        key = (events.c.attempt - low) // -(-(high - low + 1) * len(types) // most)
    marks = sa.select(
        sa.func.min(events.c.id).label("first"),
        sa.func.count().label("number"),
        sa.func.max(events.c.attempt).label("last_attempt"),
    )
    grouped = (
        marks.select_from(joined).where(*chosen).group_by(events.c.type, events.c.producer, key).subquery()
    )
    query = query_events(run).join(grouped, grouped.c.first == events.c.id)
    rows = query.add_columns(grouped.c.number, grouped.c.last_attempt).order_by(events.c.time, events.c.id)
    return [
        shown(row) | {"count": row.number, "last_attempt": row.last_attempt}
        for row in connection.execute(rows)
    ]


def _chosen(
    run: str, types: Sequence[str], first: int, last: int | None, rank: int | None
) -> tuple[list[sa.ColumnElement[bool]], sa.Join]:
    producer = placed(run)
    attempt, begins = events.c.attempt, producer.c.begins
    chosen = [events.c.run == run, events.c.type.in_(types), attempt >= 0, attempt >= first - begins]
    if last is not None:
        chosen.append(attempt <= last - begins)
    if rank is not None:
        chosen.append(producer.c.rank == rank)
    return chosen, events.join(producer, producer.c.id == events.c.producer)
