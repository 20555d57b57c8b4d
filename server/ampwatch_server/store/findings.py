"""Findings of a run, and the marks that people put on them."""

from __future__ import annotations

from typing import Any, Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.errors import AmpwatchError
from ampwatch_server import tables as t
from ampwatch_server.db import upsert

from .blob import jsonable, unpack
from .processes import not_found
from .runs import NO_VERDICT, touch

Mark = Literal["acknowledged", "muted"]
_UNMARKED: Final = {"mark": None, "marked_by": None, "marked_at": None}


class FindingNotFound(AmpwatchError):
    """A run has no such finding, or has it no more."""


def findings_of(connection: Connection, run: str) -> dict[str, Any]:
    """Verdict and findings of a run, the worst first, each with its mark. RunNotFound."""
    verdict = connection.execute(sa.select(t.run_state.c.verdict).where(t.run_state.c.run == run)).scalar()
    if verdict is None:
        raise not_found(run)
    query = sa.select(t.findings.c.key, t.findings.c.body).where(t.findings.c.run == run)
    marks = marks_of(connection, run)
    return {
        "verdict": jsonable(unpack(verdict) or NO_VERDICT),
        "findings": [
            _marked(jsonable(unpack(row.body)), marks.get(row.key))
            for row in connection.execute(query.order_by(t.findings.c.place))
        ],
    }


def mark_finding(
    connection: Connection, run: str, key: str, mark: Mark | None, who: str, now: float
) -> dict[str, Any]:
    """Put a mark on a finding, or take it away; answer the finding. RunNotFound, FindingNotFound.

    An alert that was not sent yet is not sent any more.
    """
    found = next((f for f in findings_of(connection, run)["findings"] if f["key"] == key), None)
    if found is None:
        raise FindingNotFound(f"run {run!r} has no finding {key!r}; GET /v1/runs/{run}/findings lists those")
    mine = sa.and_(t.finding_marks.c.run == run, t.finding_marks.c.key == key)
    connection.execute(t.finding_marks.delete().where(mine))
    if mark is not None:
        row = {"run": run, "key": key, "kind": found["kind"], "mark": mark, "who": who, "time": now}
        connection.execute(upsert(connection, t.finding_marks).values(row))
        waiting = t.outbox.update().where(
            t.outbox.c.run == run, t.outbox.c.key == key, t.outbox.c.due.is_not(None)
        )
        connection.execute(waiting.values(due=None, outcome=f"not sent: the finding was {mark}"))
    touch(connection, run)
    return next(f for f in findings_of(connection, run)["findings"] if f["key"] == key)


def marks_of(connection: Connection, run: str) -> dict[str, sa.Row[Any]]:
    """The marks on findings of a run, by the finding's key."""
    query = sa.select(t.finding_marks).where(t.finding_marks.c.run == run)
    return {row.key: row for row in connection.execute(query)}


def _marked(finding: dict[str, Any], mark: sa.Row[Any] | None) -> dict[str, Any]:
    if mark is None:
        return finding | _UNMARKED
    told = {"mark": mark.mark, "marked_by": mark.who, "marked_at": mark.time}
    known = {"state": "acknowledged"} if mark.mark == "acknowledged" else {}
    return finding | known | told
