"""`POST /v1/batches`: a batch in, a receipt out once it is on the disk."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

import sqlalchemy as sa
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from ampwatch.records import Batch
from ampwatch_server import schemas
from ampwatch_server import tables as t
from ampwatch_server.auth import Grant
from ampwatch_server.limits import ENCODINGS, Extent, TooLarge, decompress, read_batch
from ampwatch_server.problems import Problem
from ampwatch_server.service import Service
from ampwatch_server.store.blob import unpack

from .common import ServiceOf, answer, problems, require

router = APIRouter(tags=["batches"])

JSON: Final = "application/json"
TYPES: Final = frozenset({"application/vnd.ampwatch.batch", "application/msgpack", JSON})
_EXAMPLE: Final = {
    "producer": "5f0c9d1e7ab34c0f9f3a1b2c3d4e5f60",
    "seq": 0,
    "run": "01JDQ5W3Z8R6J2N7V4K1T9M0XC",
    "rank": 0,
    "kind": "attempts",
    "columns": {"attempt": [0, 1], "scale": [65536.0, 65536.0], "loss": [2.3, "NaN"], "found_inf": [0, 1]},
}
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "The bytes of `ampwatch.records.to_bytes`, or JSON; gzip or zstd by Content-Encoding.",
        "content": {
            "application/vnd.ampwatch.batch": {"schema": {"type": "string", "format": "binary"}},
            "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
            JSON: {"schema": {"type": "object"}, "example": _EXAMPLE},
        },
    }
}


@router.post(
    "/batches",
    response_model=schemas.Receipt,
    openapi_extra=_BODY,
    responses=problems(409, 413, 415, 426),
)
async def post_batch(
    request: Request, service: ServiceOf, _: Annotated[Grant, Depends(require("write"))]
) -> Response:
    """Store one batch. The answer comes after the durable commit; the same batch may be sent any number of times."""
    started = time.perf_counter()
    media, encoding = _media(request)
    body = await _read_body(request, service.settings.max_body_bytes)
    limit = service.settings.max_decoded_bytes
    try:
        batch, extent = await run_sync(_decode, body, encoding, limit, media == JSON)
        stored = await asyncio.wrap_future(service.inbox.append(batch, extent))
    except Exception:
        service.metrics.add("ampwatch_batches_total", label=("outcome", "refused"))
        raise
    _count(service, batch, extent, time.perf_counter() - started, new=stored.new)
    wait = await run_sync(_next_batch_s, service, batch)
    return answer({"producer": batch.producer, "seq": batch.seq, "stored": stored.new, "next_batch_s": wait})


def _media(request: Request) -> tuple[str, str]:
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if media not in TYPES:
        raise Problem(415, f"got Content-Type {media!r}, it must be one of {', '.join(sorted(TYPES))}")
    if encoding not in ENCODINGS:
        raise Problem(415, f"got Content-Encoding {encoding!r}, it must be gzip, zstd or none")
    return media, encoding


async def _read_body(request: Request, limit: int) -> bytes:
    """The body, as far as it is no longer than allowed; reading stops where it is."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge(f"the body has more than {limit:,} bytes; send fewer rows in a batch")
        parts.append(part)
    return b"".join(parts)


def _decode(body: bytes, encoding: str, limit: int, json: bool) -> tuple[Batch, Extent]:
    return read_batch(decompress(body, encoding, limit), json=json)


def _count(service: Service, batch: Batch, extent: Extent, seconds: float, *, new: bool) -> None:
    service.metrics.add("ampwatch_batches_total", label=("outcome", "stored" if new else "repeated"))
    service.metrics.add("ampwatch_ingest_seconds_total", seconds)
    if new:
        service.metrics.add("ampwatch_batch_bytes_total", len(batch.body))
        service.metrics.add("ampwatch_attempts_total", extent.rows if batch.kind == "attempts" else 0)


def _next_batch_s(service: Service, batch: Batch) -> float:
    query = sa.select(t.runs.c.started, t.run_state.c.verdict).join(
        t.run_state, t.run_state.c.run == t.runs.c.run
    )
    with service.database.read() as connection:
        row = connection.execute(query.where(t.runs.c.run == batch.run)).one_or_none()
    if row is None:  # deleted meanwhile
        return service.next_batch_s(batch.run, service.settings.clock(), trouble=False)
    trouble = unpack(row.verdict).get("word") == "failing"
    return service.next_batch_s(batch.run, row.started, trouble=trouble)
