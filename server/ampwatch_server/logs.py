"""Logs of a server: one line a request with its id, as JSON where machines read them, and no secret in any.

A request keeps the id that a proxy gave it in X-Request-ID, else gets one; the answer carries it, and so does every
line that is logged while the request is worked on.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import time
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Final, Literal

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import problem

Form = Literal["text", "json"]

log = logging.getLogger(__name__)
REQUEST_ID: Final[ContextVar[str]] = ContextVar("ampwatch_request_id", default="")

LEFT: Final = 499  # in the log only: the client went before it was answered

_GIVEN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
# what follows a scheme, a link or a cookie's name; a word as long as a token; a password in a URL
_SECRETS: Final = re.compile(
    r"(?i)(?<=bearer )[^\s'\",]+|(?<=/link/)[^\s'\"/?]+|(?<=ampwatch_session)(?:_\d+)?=[^\s'\";]+"
    r"|(?<![\w-])[\w-]{43}(?![\w-])|(?<=://)[^\s/@'\"]*:[^\s/@'\"]*(?=@)"
)
_HIDDEN: Final = "[redacted]"
_PROCESS: Final = secrets.token_hex(5)  # randomness for each request would cost more than the request
_COUNT: Final = itertools.count()


def set_up(form: Form) -> None:
    """Log to standard error: text for people, of warnings and worse; JSON lines for machines, of requests too."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines() if form == "json" else Lines("ampwatch: %(asctime)s %(levelname)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler])
    if form == "json":
        logging.getLogger("ampwatch_server").setLevel(logging.INFO)


class Lines(logging.Formatter):
    """Text without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return redacted(super().format(record))


class JsonLines(logging.Formatter):
    """An object a line: time, level, logger, message, request id, and what the caller gave as `extra["fields"]`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line of JSON."""
        moment = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redacted(json.dumps(line, ensure_ascii=False, default=str))


def redacted(text: str) -> str:
    """Text in which no token, session, link or password stands."""
    return _SECRETS.sub(_HIDDEN, text)


class RequestLog:
    """ASGI middleware, the outermost: gives each request an id and logs it; an error of ours is answered 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, started, status = _id_of(scope), time.perf_counter(), 0
        REQUEST_ID.set(request_id)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            status = LEFT
        except Exception:
            log.exception("an error of ours at %s %s", scope["method"], scope["path"])
            if status:  # it has begun: all that is left is to cut it off
                raise
            await problem(500, "the server met an error of its own; its log says more")(
                scope, receive, send_named
            )
        finally:
            _log(scope, status, time.perf_counter() - started)


def new_id() -> str:
    """An id that no other request has."""
    return f"{_PROCESS}{next(_COUNT):06x}"


def log_unread(request_id: str) -> None:
    """What came could not be parsed, so that nothing but the id of the answer is known."""
    log.info("no request 400", extra={"fields": {"status": 400, "request_id": request_id}})


def _id_of(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id")
    return given if given is not None and _GIVEN_ID.match(given) else new_id()


def _log(scope: Scope, status: int, seconds: float) -> None:
    """The path without its query, in which nothing secret stands but the codes of links, which are hidden."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(1000 * seconds, 1),
    }
    log.info("%s %s %d", scope["method"], scope["path"], status, extra={"fields": fields})
