"""`/v1/runs`: list, read, edit, delete; and what the diagnosis says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query
from sqlalchemy.engine import Connection
from starlette.responses import Response

from ampwatch.records import EVENT_TYPES
from ampwatch_server import schemas
from ampwatch_server.db import text
from ampwatch_server.store import events as store_events
from ampwatch_server.store import runs as store
from ampwatch_server.store.findings import findings_of, mark_finding
from ampwatch_server.store.removal import empty_run

from .common import (
    MAX_INTEGER,
    Admin,
    Cursor,
    Limit,
    ProjectOf,
    RunId,
    ServiceOf,
    SourceAsked,
    answer,
    problems,
    require,
    split_names,
)
from .revalidate import Tagged, TaggedRoute

router = APIRouter(tags=["runs"], dependencies=[Depends(require("read"))], route_class=TaggedRoute)

Order = Literal["-last_seen", "last_seen", "-started", "started", "name"]
Status = Literal["live", "finished", "stalled", "crashed"]


@router.get("/runs", response_model=schemas.RunPage, responses=problems())
def list_runs(
    service: ServiceOf,
    only: ProjectOf,
    project: str | None = None,
    status: Status | None = None,
    q: Annotated[
        str | None, Query(max_length=256, description="part of the name, id, project, notes or a tag")
    ] = None,
    order: Order = "-last_seen",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Runs, a page at a time."""
    with service.database.read() as connection:
        page = store.list_runs(
            connection,
            service.settings,
            only=only,
            project=project,
            status=status,
            q=q,
            order=order,
            cursor=cursor,
            limit=limit,
        )
    return answer(page)


@router.get("/runs/{run}", response_model=schemas.Run, dependencies=[Tagged], responses=problems(404))
def get_run(run: RunId, service: ServiceOf) -> Response:
    """One run."""
    with service.database.read() as connection:
        return answer(store.get_run(connection, service.settings, run))


@router.patch("/runs/{run}", response_model=schemas.Run, responses=problems(404))
def patch_run(run: RunId, changes: schemas.RunEdit, service: ServiceOf, grant: Admin) -> Response:
    """Change name, tags, notes or the archived mark."""
    given = changes.model_dump(exclude_none=True)

    def job(connection: Connection) -> dict[str, Any]:
        store.edit_run(connection, run, given)
        service.auth.note(connection, grant.who, "edit", run)
        return store.get_run(connection, service.settings, run)

    return answer(service.database.write(job))


@router.delete("/runs/{run}", status_code=204, responses=problems(404))
def delete_run(run: RunId, service: ServiceOf, grant: Admin) -> Response:
    """Delete a run and everything that hangs on it."""

    def job(connection: Connection) -> None:
        store.delete_run(connection, run)
        service.auth.note(connection, grant.who, "delete", run)

    empty_run(service.database, run)
    service.database.write(job)
    return Response(status_code=204)


@router.get(
    "/runs/{run}/events", response_model=schemas.EventPage, dependencies=[Tagged], responses=problems(404)
)
def list_events(
    run: RunId,
    service: ServiceOf,
    source: SourceAsked,
    types: Annotated[
        str, Query(alias="type", description="one or more, separated by commas; all without it")
    ] = "",
    first: Annotated[
        int | None, Query(alias="from", ge=0, le=MAX_INTEGER, description="first attempt")
    ] = None,
    last: Annotated[
        int | None, Query(alias="to", ge=0, le=MAX_INTEGER, description="last attempt, inclusive")
    ] = None,
    cursor: Cursor = None,
    limit: Limit = 200,
) -> Response:
    """Events, the oldest first; never sampled."""
    told = f"one of {', '.join(sorted(EVENT_TYPES))}"
    wanted = split_names(types, EVENT_TYPES.__contains__, told, field="type") if types else []
    with service.database.read() as connection:
        page = store_events.list_events(
            connection, run, types=wanted, first=first, last=last, source=source, cursor=cursor, limit=limit
        )
    return answer(page)


@router.get(
    "/runs/{run}/findings", response_model=schemas.Findings, dependencies=[Tagged], responses=problems(404)
)
def get_findings(run: RunId, service: ServiceOf) -> Response:
    """The verdict and the findings, the worst first."""
    with service.database.read() as connection:
        return answer(findings_of(connection, run))


@router.patch("/runs/{run}/findings/{key}", response_model=schemas.Finding, responses=problems(404))
def patch_finding(
    run: RunId,
    key: Annotated[str, Path(max_length=256)],
    change: schemas.FindingEdit,
    service: ServiceOf,
    grant: Admin,
) -> Response:
    """Acknowledge a finding, mute it, or take the mark away. The mark stands when the run is diagnosed anew.

    No alert is sent of a marked finding; a muted one silences those of its kind that follow in the run too.
    """

    def job(connection: Connection) -> dict[str, Any]:
        now = service.settings.clock()
        found = mark_finding(connection, run, text(key), change.mark, grant.who, now)
        service.auth.note(connection, grant.who, change.mark or "unmark", f"{run} {found['key']}")
        return found

    return answer(service.database.write(job))
