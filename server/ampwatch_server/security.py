"""What stands before every route: the Host and Origin of a request, and the headers of an answer."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import problem
from .settings import Settings

# plotly.js adds `<style>` elements, whose text changes with its version, and sets `style` attributes on what it draws.
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
RAW_HEADERS: Final = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_NAMES: Final = frozenset(name for name, _ in RAW_HEADERS)
_NAMES_KEPT: Final = 256  # of hosts, that need not be parsed again
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware: refuses foreign hosts and origins, adds the security headers, knows the path prefix.

    A page of another site can make a browser send requests to a port of this machine. By DNS rebinding it can even
    read the answers, but then the Host header carries its own name: only names of this server, and addresses,
    which cannot be rebound, are let in. A write from another origin is refused whatever cookie it carries.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = allowed_hosts(settings)
        self._root = settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        handler = self._app if refused is None else problem(*refused)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = (pair for pair in message.get("headers", ()) if pair[0].lower() not in _NAMES)
                message["headers"] = [*given, *RAW_HEADERS]
            await send(message)

        await handler(self._rooted(scope), receive, send_guarded)

    def _rooted(self, scope: Scope) -> Scope:
        """The request below the path prefix, whether the proxy has stripped that (JupyterHub does not) or not."""
        path = scope["path"]
        inside = path == self._root or path.startswith(f"{self._root}/")
        return {**scope, "root_path": self._root, "path": path if inside else self._root + path}

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _name(host)
        if not (name in self._hosts or _is_address(name)):
            return (
                421,
                f"this server does not answer to the host {name!r}; start it with --allowed-host {name}",
            )
        if scope["method"] not in _SAFE:
            origin = headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != host:
                return 403, "a write from another origin is refused"
        return None


def allowed_hosts(settings: Settings) -> frozenset[str]:
    """Names that a Host header may carry."""
    own = {"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
    if not _is_loopback(settings.host):
        own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(own)


@lru_cache(maxsize=_NAMES_KEPT)
def _name(host: str) -> str:
    """The name in a Host header, without its port and the brackets of an IPv6 address."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


@lru_cache(maxsize=_NAMES_KEPT)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
