"""Pages, their files and answers in JSON go compressed to who accepts gzip, as through a tunnel from a cluster.

Events are not, which would wait in the compressor, nor exports, which can be as long as a run and would take the
event loop from everyone else.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_BYTES: Final = 1024  # less is one packet either way
_LEVEL: Final = 1  # a third of the time of zlib's default, for a sixth more bytes


class Compression:
    """ASGI middleware. The tag of what was compressed is a weak one: these are not the bytes that it was made of."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._compressed = GZipMiddleware(app, LEAST_BYTES, _LEVEL)  # leaves event streams as they are

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and compress its answer."""

        async def send_tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                _weaken(MutableHeaders(raw=message["headers"]))
            await send(message)

        if scope["type"] != "http" or scope["path"].endswith("/export"):
            await self._app(scope, receive, send)
        else:
            await self._compressed(scope, receive, send_tagged)


def _weaken(headers: MutableHeaders) -> None:
    tag = headers.get("etag", "")
    if tag and headers.get("content-encoding") == "gzip" and not tag.startswith("W/"):
        headers["etag"] = f"W/{tag}"
