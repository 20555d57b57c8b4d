"""Events for a plot: each by itself while there are few, those that stand close together where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch_server.tables import events

from .events import ends, query_events, shown
from .processes import EVERYONE, Source, placed, require_run

MARKED: Final = ("growth", "backoff", "set", "restored", "skip")  # what a timeline shows
MARKS: Final = 1000  # more than that are drawn together where they stand close


def list_marks(
    connection: Connection,
    run: str,
    *,
    types: Sequence[str],
    first: int,
    last: int | None,
    source: Source = EVERYONE,
    most: int,
) -> list[dict[str, Any]]:
    """The events of some types in about `most` marks. RunNotFound.

    Where there are more, those of one type and producer within equal stretches of attempts share a mark: the first of
    them, with `count`, how many there are, and `last_attempt`. None is left out.

    Arguments:
        first, last: attempts, both inclusive, counted through the processes of a rank.
    """
    require_run(connection, run)
    chosen, joined = _chosen(run, types, first, last, source)
    bounds = sa.select(sa.func.count(), sa.func.min(events.c.attempt), sa.func.max(events.c.attempt))
    total, low, high = connection.execute(bounds.select_from(joined).where(*chosen)).one()
    if total <= most:
        key = events.c.id
    else:
        key = (events.c.attempt - low) // -(-(high - low + 1) * len(types) // most)
    marks = sa.select(
        sa.func.min(events.c.id).label("first"),
        sa.func.count().label("number"),
        sa.func.max(ends()).label("last_attempt"),
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
    run: str, types: Sequence[str], first: int, last: int | None, source: Source
) -> tuple[list[sa.ColumnElement[bool]], sa.Join]:
    producer = placed(run)
    attempt, begins = events.c.attempt, producer.c.begins
    chosen = [events.c.run == run, events.c.type.in_(types), attempt >= 0, ends() >= first - begins]
    if last is not None:
        chosen.append(attempt <= last - begins)
    chosen.append(source.among(producer.c.rank, producer.c.producer))
    return chosen, events.join(producer, producer.c.id == events.c.producer)
