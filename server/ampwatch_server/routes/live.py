"""`GET /v1/live`: server-sent events about runs that change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import Response, StreamingResponse

from ampwatch.records import RUN_ID
from ampwatch_server.auth import Auth, Grant
from ampwatch_server.live import News, is_news
from ampwatch_server.problems import Problem
from ampwatch_server.service import Service
from ampwatch_server.store.processes import not_found, require_run
from ampwatch_server.store.runs import news_now
from ampwatch_server.writer import Unavailable

from .common import ServiceOf, problems, require

router = APIRouter(tags=["live"])

TOLD_FIRST: Final = 100
_EXAMPLE: Final = (
    'id: {"5f0c9d1e7ab34c0f9f3a1b2c3d4e5f60":41}\nevent: run\n'
    'data: {"run":"01JDQ5W3Z8R6J2N7V4K1T9M0XC","cursor":{"5f0c9d1e7ab34c0f9f3a1b2c3d4e5f60":41},'
    '"attempts":1200,"scale":65536.0,"verdict":{"word":"healthy"},"status":"live","project":"vision"}\n\n'
)
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}}}
}


@router.get("/live", response_class=StreamingResponse, responses=_STREAM | problems(404))
async def live(
    service: ServiceOf,
    grant: Annotated[Grant, Depends(require("read"))],
    run: str | None = None,
    cursor: Annotated[str | None, Query(description="JSON: producer → sequence number seen")] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """`event: run` for every run, or for one, when it has changed; a comment every 15 s. Ends when its token does.

    `cursor`, or the Last-Event-ID that a browser sends when it connects again, leaves out what was seen.
    """
    seen = _read_cursor(last_event_id or cursor)
    if run is not None:
        await run_sync(_require, service, run, grant.project)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _events(service, run, seen, grant), headers=headers, media_type="text/event-stream"
    )


async def _events(
    service: Service, run: str | None, seen: dict[str, int], grant: Grant
) -> AsyncIterator[bytes]:
    def now() -> News:
        with service.database.read() as connection:
            states, since = news_now(connection, service.settings, run, TOLD_FIRST, only=grant.project)
        return [(revision, state) for revision, state in states if is_news(state, seen)], since

    yield b": connected\n\n"
    async for state in service.hub.states(run, now):
        if not await _stands(service.auth, grant):
            return
        if state is None:
            yield b": still here\n\n"
            continue
        if grant.project not in (None, state["project"]):
            continue
        cursor, data = msgspec.json.encode(state["cursor"]), msgspec.json.encode(state)
        yield b"id: %b\nevent: run\ndata: %b\n\n" % (cursor, data)


async def _stands(auth: Auth, grant: Grant) -> bool:
    """Whether who opened the stream may still read it. In this thread where the database need not be asked."""
    try:
        return auth.holds(grant) if auth.is_fresh else await run_sync(auth.holds, grant)
    except Unavailable:  # then there is no news either
        return True


def _require(service: Service, run: str, project: str | None) -> None:
    if not RUN_ID.match(run):
        raise not_found(run)
    with service.database.read() as connection:
        require_run(connection, run, project)


def _read_cursor(text: str | None) -> dict[str, int]:
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Problem(
            422, f"it must be a JSON object of sequence numbers: {error}", field="cursor"
        ) from error
