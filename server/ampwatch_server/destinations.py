"""Where alerts go: the destinations of the server's own configuration, and the one request that each gets.

A destination is named in a file that the server is started with, never by the API: whoever may read findings must
not be able to make the server send requests. Its URL is often a secret, and is not shown.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import msgspec

from ampwatch.diagnosis.findings import SEVERITIES, Severity
from ampwatch.errors import AmpwatchError, SettingsError

TIMEOUT_S: Final = 10.0

# addresses that stand for the IPv4 address in them: bits from the right end at which it begins (RFC 6052, 3056, 4291, 2765)
_EMBEDDING: Final = tuple(
    (ipaddress.IPv6Network(network), shift)
    for network, shift in (
        ("64:ff9b::/96", 0),
        ("2002::/16", 80),
        ("::/96", 0),
        ("::ffff:0:0/96", 0),
        ("::ffff:0:0:0/96", 0),
    )
)
_LOCAL_NAT64: Final = ipaddress.IPv6Network(
    "64:ff9b:1::/48"
)  # RFC 8215: what is behind is the network's own affair

Resolve = Callable[[str, int], list[str]]


class NotSent(AmpwatchError):
    """A destination did not take an alert. What it said beyond its status is not told."""


class NoAnswer(NotSent):
    """It said nothing at all, which may have taken `TIMEOUT_S` to find out."""


class Destination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One webhook.

    Arguments:
        name: shown in its place.
        url: http or https.
        shape: `json` (run, finding, link) or `slack` (a text).
        severity: findings that are at least so severe are told; null leaves it to `kinds`.
        kinds: findings of these kinds are told too, whatever their severity.
        allow_private: it may lie on a loopback or private address.
    """

    name: str
    url: str
    shape: Literal["json", "slack"] = "json"
    severity: Severity | None = "error"
    kinds: tuple[str, ...] = ()
    allow_private: bool = False

    def wants(self, kind: str, severity: str) -> bool:
        """Whether a finding is to be told here."""
        ranked: tuple[str, ...] = SEVERITIES
        severe = self.severity is not None and ranked.index(severity) <= ranked.index(self.severity)
        return severe or kind in self.kinds


class AlertSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of `ampwatch serve --alerts`: destinations, and the server's address for the links in alerts."""

    destinations: tuple[Destination, ...] = ()
    link: str = ""


def read_alerts(path: Path) -> AlertSettings:
    """The alert settings in a JSON file. SettingsError names what is wrong with it."""
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=AlertSettings)
    except OSError as error:
        raise SettingsError(f"alerts: {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SettingsError(f"alerts: {path}: {error}; docs/server.md shows the file") from error
    names = [destination.name for destination in settings.destinations]
    if len(set(names)) < len(names) or not all(names):
        raise SettingsError(f"alerts: {path}: every destination needs a name of its own")
    for destination in settings.destinations:
        if not _is_web(destination.url):
            raise SettingsError(
                f"alerts: {path}: the url of {destination.name!r} must begin with https:// or http://"
            )
    return settings


def send(destination: Destination, message: Mapping[str, Any], resolve: Resolve | None = None) -> str:
    """Post one message; answer what became of it. NotSent.

    The name is resolved once, every address is checked, and the request goes to one that was: a name that resolves
    otherwise a moment later changes nothing. Redirects are not followed, proxies of the environment not used.
    """
    url = httpx.URL(destination.url)
    address = _address(destination, url, resolve or _resolve)
    headers = {"Host": url.netloc.decode(), "Content-Type": "application/json", "User-Agent": "ampwatch"}
    request = httpx.Request(
        "POST",
        url.copy_with(host=address),
        content=msgspec.json.encode(message),
        headers=headers,
        extensions={"sni_hostname": url.host},  # the certificate is that of the name
    )
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            response = client.send(request, stream=True)  # the body stays unread
            response.close()
    except httpx.HTTPError as error:
        raise NoAnswer(f"no answer: {type(error).__name__}") from error
    if not response.is_success:
        raise NotSent(f"answered {response.status_code}")
    return f"answered {response.status_code}"


def _address(destination: Destination, url: httpx.URL, resolve: Resolve) -> str:
    try:
        found = resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
    except (OSError, UnicodeError) as error:
        raise NotSent("its name cannot be resolved") from error
    if not destination.allow_private and not all(map(is_public, found)):
        raise NotSent("its address is loopback or private, which the server's alert settings do not allow")
    return found[0]


def _resolve(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_public(address: str) -> bool:
    """Whether a message to this address leaves for the internet, also through a translator of addresses."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _LOCAL_NAT64:
            return False
        ip = _embedded(ip) or ip
    return ip.is_global and not ip.is_multicast


def _embedded(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a translator or tunnel would send it to."""
    shift = next((shift for network, shift in _EMBEDDING if ip in network), None)
    return None if shift is None else ipaddress.IPv4Address(int(ip) >> shift & 0xFFFF_FFFF)


def _is_web(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)
