"""ETags: of a run that is finished, nothing changes but what people make of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

import sqlalchemy as sa
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from ampwatch_server import tables as t
from ampwatch_server.problems import NotModified
from ampwatch_server.service import Service
from ampwatch_server.store.runs import status_now

from .common import RunId, ServiceOf


class TaggedRoute(APIRoute):
    """A route whose answers carry the headers that `tag` found."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, and the headers after it."""
        handle = super().get_route_handler()

        async def tagged(request: Request) -> Response:
            response = await handle(request)
            response.headers.update(getattr(request.state, "tag_headers", {}))
            return response

        return tagged


def tag(request: Request, run: RunId, service: ServiceOf) -> None:
    """Give the answer about a finished run an ETag. NotModified where the client has that answer already."""
    if (found := _tag_of(service, run, request.app.version)) is None:
        return
    headers = {"ETag": found, "Cache-Control": "private, no-cache"}
    if found in _given(request):
        raise NotModified(headers)
    request.state.tag_headers = headers


Tagged = Depends(tag)


def _given(request: Request) -> set[str]:
    return {given.strip() for given in request.headers.get("if-none-match", "").split(",")}


def _tag_of(service: Service, run: str, version: str) -> str | None:
    """The tag of a run as it is now; None while it may grow. One that was made anew has another start."""
    query = sa.select(t.runs.c.started, t.run_state.c.revision, status_now(service.settings).label("status"))
    with service.database.read() as connection:
        joined = query.join(t.run_state, t.run_state.c.run == t.runs.c.run).where(t.runs.c.run == run)
        row = connection.execute(joined).one_or_none()
    if row is None or row.status != "finished":
        return None
    state = f"{version} {run} {row.started} {row.revision}"
    return f'W/"{hashlib.blake2b(state.encode(), digest_size=12).hexdigest()}"'
