"""The processes of a run in their order: a job that is resumed counts its attempts from 0 again.

On a page they stand one after the other. Where one begins there is the number of attempts that the processes before
it, of the same rank, have made.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.errors import RunNotFound
from ampwatch_server.tables import producers, runs


def placed(run: str | sa.BindParameter[str]) -> sa.Subquery:
    """The producers of a run, each with `begins`: attempts of those of its rank that came before it."""
    row = producers.c
    before = sa.func.sum(row.end_attempt).over(
        partition_by=row.rank, order_by=(row.first_seen, row.id), rows=(None, -1)
    )
    begins = sa.cast(sa.func.coalesce(before, 0), sa.BigInteger).label("begins")
    return sa.select(producers, begins).where(row.run == run).subquery()


class Source(NamedTuple):
    """Of whom to read: of one rank, of one producer, or (None) of all."""

    rank: int | None = None
    producer: str | None = None

    def among(self, rank: sa.ColumnElement[int], producer: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
        """The condition on the columns that hold rank and producer."""
        wanted = [rank == self.rank] if self.rank is not None else []
        wanted += [producer == self.producer] if self.producer is not None else []
        return sa.and_(sa.true(), *wanted)


EVERYONE: Final = Source()
_PLACED: Final = placed(sa.bindparam("of_run"))
_PROCESSES: Final = sa.select(_PLACED).order_by(_PLACED.c.rank, _PLACED.c.first_seen, _PLACED.c.id)


def processes_of(connection: Connection, run: str, source: Source = EVERYONE) -> list[Row[Any]]:
    """The producers of a run, with `begins`, by rank and age. RunNotFound."""
    among = source.among(_PLACED.c.rank, _PLACED.c.producer)
    query = _PROCESSES if source == EVERYONE else _PROCESSES.where(among)
    rows = list(connection.execute(query, {"of_run": run}).all())
    if not rows:
        require_run(connection, run)
    return rows


def begins_of(connection: Connection, run: str) -> dict[str, int]:
    """Where each producer of a run begins. RunNotFound."""
    return {row.producer: row.begins for row in processes_of(connection, run)}


def require_run(connection: Connection, run: str, project: str | None = None) -> None:
    """RunNotFound where there is no such run, or none of this project."""
    mine = runs.c.run == run if project is None else sa.and_(runs.c.run == run, runs.c.project == project)
    if connection.execute(sa.select(runs.c.run).where(mine)).scalar() is None:
        raise not_found(run)


def not_found(run: str) -> RunNotFound:
    """The error for a run that is not stored."""
    return RunNotFound(f"run {run!r} is not stored here; GET /v1/runs lists those that are")
