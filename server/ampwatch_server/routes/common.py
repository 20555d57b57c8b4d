"""What routes share: the service, who asks, and how an answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, cast

import msgspec
from fastapi import Depends, Query, Request
from starlette.responses import Response

from ampwatch.records import RUN_ID
from ampwatch_server import schemas
from ampwatch_server.auth import COOKIE, Grant, Scope
from ampwatch_server.problems import MEDIA_TYPE, Problem
from ampwatch_server.service import Service
from ampwatch_server.store.processes import Source, not_found, require_run
from ampwatch_server.store.series import Range

MAX_POINTS: Final = 20_000
MAX_INTEGER: Final = 2**63 - 1  # of both databases

_NOBODY: Final = (
    "send `Authorization: Bearer <token>`; the token of the user who started the server lies in ~/.config/ampwatch/token. "
    "A browser opens the link that the server printed last"
)
_UNKNOWN: Final = "this server does not know the token: it was revoked, or is another server's; `ampwatch token create` makes one"


def service_of(request: Request) -> Service:
    """The service behind the app."""
    return cast(Service, request.app.state.service)


ServiceOf = Annotated[Service, Depends(service_of)]


def grant_of(request: Request, service: Service) -> Grant | None:
    """Who asks: by bearer token, else by the cookie of a browser's session."""
    if (token := bearer(request)) is not None:
        return service.auth.find(token, "token")
    cookie = request.cookies.get(cookie_of(request))
    return service.auth.find(cookie, "session") if cookie else None


def cookie_of(request: Request) -> str:
    """Name of the session's cookie. Browsers keep cookies by host, not by port: of two servers each has its own."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def bearer(request: Request) -> str | None:
    """The token that a request carries."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else None


def require(scope: Scope, *, whole: bool = False) -> Callable[[Request, Service], Grant]:
    """A dependency that lets in who has the scope: 401 for the unknown, 403 for the others.

    Arguments:
        whole: and is not bound to a project: what is asked for is the server's.
    """

    def check(request: Request, service: ServiceOf) -> Grant:
        grant = grant_of(request, service)
        if grant is None:
            told = _UNKNOWN if bearer(request) else _NOBODY
            raise Problem(401, told, headers={"WWW-Authenticate": "Bearer"})
        return allowed(grant, scope, request, service, whole=whole)

    return check


def allowed(grant: Grant, scope: Scope, request: Request, service: Service, *, whole: bool = False) -> Grant:
    """A grant that is known, if it has the scope: 403 where it has not. Its use is noted."""
    service.auth.used(grant, request.client.host if request.client else "")
    if not grant.scopes & {scope, "admin"}:
        raise Problem(403, f"the {grant.kind} {grant.name!r} lacks the scope {scope!r}")
    if whole and grant.project is not None:
        raise Problem(403, f"the {grant.kind} {grant.name!r} is for project {grant.project!r} only")
    return grant


def asked(
    first: Annotated[int, Query(alias="from", ge=0, le=MAX_INTEGER, description="first attempt")] = 0,
    last: Annotated[
        int | None, Query(alias="to", ge=0, le=MAX_INTEGER, description="last attempt, inclusive")
    ] = None,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="points wanted of each stream")] = 600,
) -> Range:
    """The range parameters of a read."""
    return Range(first, last, points)


def run_id(run: str, request: Request, service: ServiceOf) -> str:
    """The run of a path. RunNotFound for what cannot be one, before a database sees it, and for another project's."""
    if not RUN_ID.match(run):
        raise not_found(run)
    project = project_of(request, service)
    if project is not None:
        with service.database.read() as connection:
            require_run(connection, run, project)
    return run


def project_of(request: Request, service: ServiceOf) -> str | None:
    """The project whose runs alone may be seen by who asks; None: all of them."""
    grant = grant_of(request, service)
    return None if grant is None else grant.project


def source_asked(
    rank: Annotated[int | None, Query(ge=0, lt=2**31, description="of this rank only")] = None,
    producer: Annotated[
        str | None, Query(pattern=r"^[0-9a-f]{32}$", description="of this process only")
    ] = None,
) -> Source:
    """The parameters that choose a rank or a producer."""
    return Source(rank, producer)


Admin = Annotated[Grant, Depends(require("admin"))]
WholeAdmin = Annotated[Grant, Depends(require("admin", whole=True))]
ProjectOf = Annotated[str | None, Depends(project_of)]
RunId = Annotated[str, Depends(run_id)]
Asked = Annotated[Range, Depends(asked)]
SourceAsked = Annotated[Source, Depends(source_asked)]
Stream = Annotated[int | None, Query(ge=0, lt=2**31)]
Cursor = Annotated[str | None, Query(max_length=4096, description="`next` of the page before")]
Limit = Annotated[int, Query(ge=1, le=1000)]


def answer(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Plain data as JSON, written once and not validated again."""
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def split_names(names: str, allowed: Callable[[str], bool], told: str, *, field: str = "names") -> list[str]:
    """A comma-separated parameter, called `field`. 422 for a name that is not allowed, or for none."""
    found = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in found:
        if not allowed(name):
            raise Problem(422, f"got {name!r}, it must be {told}", field=field)
    if not found:
        raise Problem(422, f"name at least one: {told}", field=field)
    return found


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of the errors of a route, beside those that any may answer."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"model": schemas.Problem, "content": content} for status in (401, 403, 422, 503, *statuses)
    }
