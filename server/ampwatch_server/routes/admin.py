"""What an administrator sees and does: destinations of alerts, tokens, the audit."""

from __future__ import annotations

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Path
from starlette.responses import Response

from ampwatch_server import schemas
from ampwatch_server import tables as t
from ampwatch_server.destinations import NotSent
from ampwatch_server.problems import Problem
from ampwatch_server.service import Service
from ampwatch_server.store.paging import read_cursor, write_cursor
from ampwatch_server.token_book import TokenBook

from .common import MAX_INTEGER, Cursor, Limit, ServiceOf, WholeAdmin, answer, problems

router = APIRouter(tags=["administration"])


@router.get("/alerts", response_model=schemas.AlertPage, responses=problems())
def list_alerts(service: ServiceOf, _: WholeAdmin) -> Response:
    """Where findings are told: the destinations of the server's own configuration, without their URLs."""
    with service.database.read() as connection:
        return answer({"items": service.alerts.shown(connection), "next": None})


@router.post("/alerts/{name}/test", response_model=schemas.AlertTest, responses=problems(404))
def test_alert(name: Annotated[str, Path(max_length=256)], service: ServiceOf, grant: WholeAdmin) -> Response:
    """Send a message that says that it is a test, and tell whether it was taken."""
    if name not in service.alerts.names:
        raise Problem(404, f"there is no destination {name!r}; GET /v1/alerts lists those that there are")
    service.database.write(lambda c: service.auth.note(c, grant.who, "test", f"alert {name}"))
    try:
        return answer({"sent": True, "outcome": service.alerts.test(name)})
    except NotSent as error:
        return answer({"sent": False, "outcome": str(error)})


@router.get("/tokens", response_model=schemas.TokenPage, responses=problems())
def list_tokens(service: ServiceOf, grant: WholeAdmin, cursor: Cursor = None, limit: Limit = 200) -> Response:
    """Tokens of programs, a page at a time."""
    (after,) = read_cursor(cursor, (int,)) or (0,)
    rows = _book(service, grant).list(after, limit + 1)
    following = write_cursor((rows[limit - 1]["id"],)) if len(rows) > limit else None
    return answer({"items": rows[:limit], "next": following})


@router.post("/tokens", status_code=201, response_model=schemas.NewToken, responses=problems())
def create_token(asked: schemas.TokenAsked, service: ServiceOf, grant: WholeAdmin) -> Response:
    """Make a token. Its value is in this answer and nowhere else."""
    value = _book(service, grant).create(asked.name, asked.scopes, asked.project)
    made = {"token": value} | asked.model_dump()
    return answer(made, 201, headers={"Cache-Control": "no-store"})


@router.delete("/tokens/{token}", status_code=204, responses=problems(404))
def revoke_token(
    token: Annotated[int, Path(ge=0, le=MAX_INTEGER)], service: ServiceOf, grant: WholeAdmin
) -> Response:
    """Revoke a token; every server refuses it within seconds."""
    _book(service, grant).revoke(token)
    return Response(status_code=204)


@router.get("/audit", response_model=schemas.AuditPage, responses=problems())
def list_audit(service: ServiceOf, _: WholeAdmin, cursor: Cursor = None, limit: Limit = 100) -> Response:
    """Who did what, the newest first."""
    query = sa.select(t.audit).order_by(t.audit.c.id.desc()).limit(limit + 1)
    if (after := read_cursor(cursor, (int,))) is not None:
        query = query.where(t.audit.c.id < after[0])
    with service.database.read() as connection:
        rows = [dict(row) for row in connection.execute(query).mappings()]
    following = write_cursor((rows[limit - 1]["id"],)) if len(rows) > limit else None
    return answer({"items": rows[:limit], "next": following})


def _book(service: Service, grant: WholeAdmin) -> TokenBook:
    return TokenBook(service.database, service.settings, service.auth, grant.who)
