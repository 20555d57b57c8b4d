"""Errors as problem documents (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ampwatch.errors import AmpwatchError, InvalidBatch, InvalidPolicy, RunNotFound, UnsupportedVersion

from .inbox import Conflict, OtherProject, Overloaded
from .limits import TooLarge
from .store.findings import FindingNotFound
from .token_book import TokenNotFound
from .writer import Unavailable

log = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
_STATUS: Final[dict[type[AmpwatchError], int]] = {
    UnsupportedVersion: 426,  # before InvalidBatch, which it is too: a newer client keeps what an upgrade can read
    InvalidBatch: 422,
    InvalidPolicy: 422,
    RunNotFound: 404,
    FindingNotFound: 404,
    TokenNotFound: 404,
    Conflict: 409,
    OtherProject: 403,
    TooLarge: 413,
    Overloaded: 503,
    Unavailable: 503,
}


class Problem(AmpwatchError):
    """An error with the status that a client shall see.

    Arguments:
        status: of HTTP.
        detail: what was got, what is allowed, what to do.
        field: the parameter or field to blame, where there is one.
        headers: to send beside it.
    """

    def __init__(
        self, status: int, detail: str, *, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.field, self.headers = status, detail, field, headers


def problem(
    status: int, detail: str, *, field: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """A problem document as a response."""
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    if field is not None:
        document["field"] = field
    return Response(msgspec.json.encode(document), status, headers, media_type=MEDIA_TYPE)


class NotModified(AmpwatchError):
    """What a client has is what it would get: answered 304.

    Arguments:
        headers: of the answer.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__("not modified")
        self.headers = headers


def answer_to(error: AmpwatchError) -> Response:
    """What a client is told of an error of ours."""
    if isinstance(error, NotModified):
        return Response(status_code=304, headers=error.headers)
    if isinstance(error, Problem):
        return problem(error.status, error.detail, field=error.field, headers=error.headers)
    status = next((s for kind, s in _STATUS.items() if isinstance(error, kind)), 500)
    if isinstance(error, Unavailable):  # where the database is, is nobody's business who has no token
        log.warning("%s", error)
        told = "the database cannot be used now; the server's log says why"
        return problem(status, told, headers={"Retry-After": "1"})
    if isinstance(error, (InvalidBatch, InvalidPolicy)):
        return problem(status, error.reason, field=error.field)
    return problem(status, str(error), headers={"Retry-After": "1"} if status == 503 else None)


def install(app: FastAPI) -> None:
    """Make every error of an app a problem document; those that are bugs are left to `logs.RequestLog`."""
    app.add_exception_handler(AmpwatchError, _on_own)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_parameter)


def _on_own(_: Request, error: Exception) -> Response:
    assert isinstance(error, AmpwatchError)
    return answer_to(error)


def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail, headers=error.headers)


def _on_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [] if first["type"] == "json_invalid" else first["loc"][1:]
    return problem(422, first["msg"], field=".".join(map(str, place)) or "body")
