"""`POST /v1/batches`: a batch in, or several, and a receipt for each out once it is on the disk."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ampwatch import records
from ampwatch.errors import AmpwatchError
from ampwatch.records import Batch
from ampwatch_server import schemas
from ampwatch_server.auth import Grant
from ampwatch_server.inbox import Stored
from ampwatch_server.limits import ENCODINGS, Extent, TooLarge, decompress, read_batch
from ampwatch_server.problems import Problem, answer_to
from ampwatch_server.rates import Rates
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings

from .common import allowed, answer, bearer, problems, require, service_of


class Shortcut:
    """ASGI middleware: gives batches to `store`, past an app that would find it too.

    Finding a route, and whatever else a framework does around a handler, takes longer than storing a small batch. In
    the router the route stands for its documentation, and for other methods, which it refuses.

    Arguments:
        app: for all other requests.
        guarded: puts what stands before every route before a handler.
        paths: at which batches are posted.
    """

    def __init__(
        self, app: ASGIApp, service: Service, guarded: Callable[[ASGIApp], ASGIApp], paths: Collection[str]
    ) -> None:
        self._app, self._service, self._paths = app, service, frozenset(paths)
        self._store = guarded(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a batch, or pass a request on."""
        is_batch = scope["type"] == "http" and scope["path"] in self._paths and scope["method"] == "POST"
        await (self._store if is_batch else self._app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answered = await store(Request(scope, receive), self._service)
        except AmpwatchError as error:
            answered = answer_to(error)
        await answered(scope, receive, send)


_Checked: TypeAlias = tuple[Batch, Extent]
_Read: TypeAlias = _Checked | AmpwatchError
_Outcome: TypeAlias = tuple[_Checked, Stored] | AmpwatchError
"""A batch and what became of it, or what it is refused for."""

router = APIRouter(tags=["batches"])
_may_write = require("write")

PATH: Final = "/batches"
_SMALL: Final = 1 << 16  # bytes, as sent and unpacked, that are decoded faster than another thread is reached

JSON: Final = "application/json"
TOGETHER: Final = "application/vnd.ampwatch.batches"
TYPES: Final = frozenset({"application/vnd.ampwatch.batch", "application/msgpack", JSON, TOGETHER})
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
        "description": "The bytes of `ampwatch.records.to_bytes`, or JSON; or, of several batches, those of "
        "`ampwatch.records.join`, each answered for itself. gzip or zstd by Content-Encoding.",
        "content": {
            "application/vnd.ampwatch.batch": {"schema": {"type": "string", "format": "binary"}},
            "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
            JSON: {"schema": {"type": "object"}, "example": _EXAMPLE},
            TOGETHER: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post(
    PATH,
    response_model=schemas.Receipt | schemas.Answers,
    openapi_extra=_BODY,
    responses=problems(409, 413, 415, 429),
)
async def post_batch(request: Request) -> Response:
    """Store one batch, or several. The answer comes after the durable commit; the same batch may be sent any number of
    times.
    """
    return await store(request, service_of(request))


async def store(request: Request, service: Service) -> Response:
    """Store what a request holds: the receipt of a batch, or the error to answer with; of several the answer to each."""
    grant = await _writer(request, service)
    if (refusal := _too_often(service.token_rates, grant.id, "this token")) is not None:
        raise refusal
    started = time.perf_counter()
    try:
        media, read = await _read(request, service.settings)
        checked = [_admitted(each, grant, service, is_first=i == 0) for i, each in enumerate(read)]
        outcomes = await _outcomes(checked, grant, service)
    except Exception:
        service.metrics.add("ampwatch_batches_total", label=("outcome", "refused"))
        raise
    service.metrics.add("ampwatch_ingest_seconds_total", time.perf_counter() - started)
    told = [await _told(outcome, service) for outcome in outcomes]
    if media == TOGETHER:
        return answer({"answers": [_as_alone(each) for each in told]})
    (one,) = told
    return answer_to(one) if isinstance(one, AmpwatchError) else answer(one)


async def _writer(request: Request, service: Service) -> Grant:
    """Who sends. Looked up in this thread where the token is known: changing threads costs more."""
    token = bearer(request)
    grant = None if token is None else service.auth.known(token)
    if grant is None:
        return await run_sync(_may_write, request, service)
    return allowed(grant, "write", request, service)


def _too_often(rates: Rates, sender: Hashable, told: str) -> Problem | None:
    if (wait_s := rates.wait_s(sender)) <= 0:
        return None
    headers = {"Retry-After": str(math.ceil(wait_s))}
    return Problem(429, f"{told} sends too often; send the same batch again later", headers=headers)


async def _read(request: Request, settings: Settings) -> tuple[str, list[_Read]]:
    """The media type of a request, and the batches in it."""
    media, encoding = _media(request)
    body = await _read_body(request, settings.max_body_bytes)
    if len(body) < _SMALL:
        with suppress(TooLarge):  # it unpacks to more than is decoded here
            return media, _decode(body, media, encoding, min(_SMALL, settings.max_decoded_bytes))
    return media, await run_sync(_decode, body, media, encoding, settings.max_decoded_bytes)


def _admitted(read: _Read, grant: Grant, service: Service, *, is_first: bool) -> _Read:
    """A batch of a request, or why it may not pass. For the first one the token has been asked before it was read."""
    if isinstance(read, AmpwatchError):
        return read
    refusal = None if is_first else _too_often(service.token_rates, grant.id, "this token")
    producer = read[0].producer
    return refusal or _too_often(service.producer_rates, producer, f"producer {producer}") or read


async def _outcomes(checked: Sequence[_Read], grant: Grant, service: Service) -> list[_Outcome]:
    """What became of each, after the commit that they share with all that this thread has read by now."""
    new = [each for each in checked if not isinstance(each, AmpwatchError)]
    if not new:
        return [each for each in checked if isinstance(each, AmpwatchError)]
    soon = asyncio.get_running_loop().call_soon
    stored: Sequence[Stored | BaseException] = await service.handoff.wait(
        lambda told: service.inbox.append_all(new, told, project=grant.project, begin=soon)
    )
    left = iter(stored)
    return [each if isinstance(each, AmpwatchError) else _outcome(each, next(left)) for each in checked]


def _outcome(checked: _Checked, stored: Stored | BaseException) -> _Outcome:
    if isinstance(stored, Stored):
        return checked, stored
    if isinstance(stored, AmpwatchError):
        return stored
    raise stored


async def _told(outcome: _Outcome, service: Service) -> dict[str, Any] | AmpwatchError:
    """The receipt of a batch, or its error."""
    if isinstance(outcome, AmpwatchError):
        service.metrics.add("ampwatch_batches_total", label=("outcome", "refused"))
        return outcome
    (batch, extent), stored = outcome
    _count(service, batch, extent, new=stored.new)
    wait_s = service.known_wait_s(batch.run)
    if wait_s is None:
        wait_s = await run_sync(service.look_up_wait_s, batch.run)
    about = {"producer": batch.producer, "seq": batch.seq, "stored": stored.new, "last_seq": stored.last_seq}
    return about | {"next_batch_s": wait_s}


def _as_alone(told: dict[str, Any] | AmpwatchError) -> dict[str, Any]:
    """What a batch would have been answered alone."""
    if not isinstance(told, AmpwatchError):
        return {"status": 200, "body": told}
    answered = answer_to(told)
    alone = {"status": answered.status_code, "body": msgspec.Raw(bytes(answered.body))}
    wait_s = answered.headers.get("Retry-After")
    return alone if wait_s is None else alone | {"retry_after_s": int(wait_s)}


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


def _decode(body: bytes, media: str, encoding: str, limit: int) -> list[_Read]:
    data = decompress(body, encoding, limit)
    if media != TOGETHER:
        return [_decode_one(data, json=media == JSON)]
    return [_decode_one(each, json=False) for each in records.split(data)]


def _decode_one(data: bytes, *, json: bool) -> _Read:
    try:
        return read_batch(data, json=json)
    except AmpwatchError as error:
        return error


def _count(service: Service, batch: Batch, extent: Extent, *, new: bool) -> None:
    service.metrics.add("ampwatch_batches_total", label=("outcome", "stored" if new else "repeated"))
    if new:
        service.metrics.add("ampwatch_batch_bytes_total", len(batch.body))
        service.metrics.add("ampwatch_attempts_total", extent.rows if batch.kind == "attempts" else 0)
