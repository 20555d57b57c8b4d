"""What a server's answer to a batch means, and what a person can do where it is not the one that was hoped for.

| answer | outcome |
|---|---|
| 2xx with a JSON object | stored |
| no connection, 408, 429, 5xx | later: it may pass |
| 401, 403, 421; what no ampwatch server answers to a batch (a web page, a redirection, 404) | barred: a person must do something |
| 413 | too large: in parts it may be taken |
| 415, 426 | unread: in another encoding it may be taken |
| any other 4xx | refused: this batch never |

Of several batches in one request each has an answer of its own, that which it would have got alone, unless it is the
request that is answered.
"""

from __future__ import annotations

import ipaddress
import math
import re
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    import httpx

LONGEST_PAUSE_S: Final = 86400.0

_FOREIGN: Final = frozenset({400, 404, 405, 501})  # what another kind of server says of such a request
_MENDABLE: Final[dict[int, Literal["too large", "unread"]]] = {413: "too large", 415: "unread", 426: "unread"}
_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+\Z")


class Answer(NamedTuple):
    """An answer, or its absence.

    `pause_s` is the time that the server asks for before the next request, None where it asks for none. `about` tells
    warnings apart, of which one is given for each. `status` is 0 where there was no response. `last_seq` is the highest
    number that the server had of the producer before this batch, None where it does not say.
    """

    outcome: Literal["stored", "later", "barred", "too large", "unread", "refused"]
    about: str = ""
    warning: str = ""
    pause_s: float | None = None
    status: int = 0
    last_seq: int | None = None

    @property
    def comes_again(self) -> bool:
        """Whether the same batch is to be sent again."""
        return self.outcome in ("later", "barred")


def read(response: httpx.Response, server: str, token: str | None) -> Answer:
    """What a response means."""
    return _read(response, server, token)._replace(status=response.status_code)


def read_all(response: httpx.Response, count: int, server: str, token: str | None) -> list[Answer] | Answer:
    """What the response to so many batches means for each of them; one answer where it is about the request."""
    import httpx

    if not response.is_success:
        return read(response, server, token)
    try:
        told = msgspec.json.decode(response.content, type=_Several).answers
    except msgspec.MsgspecError:
        told = []
    if len(told) != count:
        advice = _foreign_advice(response, _json_of(response), server)
        return Answer("barred", "foreign", advice, status=response.status_code)
    return [
        read(httpx.Response(each.status, headers=each.headers, json=each.body), server, token)
        for each in told
    ]


def failed(error: httpx.HTTPError, server: str) -> Answer:
    """What it means that there was no response."""
    text = re.sub(r"\A\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return Answer("later", "connection", f"{server} cannot be reached: {text}{_hint(text)}")


def why_not(server: str) -> str:
    """Why nothing is sent to this address; empty if it can be."""
    try:
        parts = urlsplit(server)
        host = parts.hostname or ""
        is_address = parts.scheme in ("http", "https") and bool(_HOST.match(host)) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        return f"server {server!r} is not an address such as https://ampwatch.example.org"
    if parts.scheme == "http" and not is_loopback(host):
        tunnel = f"ssh -L 8642:127.0.0.1:{parts.port or 80} {host}"
        return (
            f"server {server} is another machine and not https: whoever listens could read the token. Give it https, "
            f"or a tunnel ({tunnel}) and http://127.0.0.1:8642"
        )
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def may_be_proxied(server: str) -> bool:
    """Whether a proxy of the environment may be used: it would be handed the token on the way to this machine itself."""
    return not is_loopback(urlsplit(server).hostname or "")


class _Alone(msgspec.Struct):
    """What one of several batches would have been answered alone."""

    status: int
    body: dict[str, Any]
    retry_after_s: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class _Several(msgspec.Struct):
    answers: list[_Alone]


def _read(response: httpx.Response, server: str, token: str | None) -> Answer:
    status, said = response.status_code, _json_of(response)
    if response.is_success and said is not None:
        last_seq = said.get("last_seq")
        known = last_seq if isinstance(last_seq, int) else None
        return Answer("stored", pause_s=_seconds(said.get("next_batch_s")), last_seq=known)
    if status in (401, 403):
        return Answer("barred", "token", _token_advice(server, token, _barred(response, said)))
    if status in (408, 429) or (status >= 500 and status != 501):
        trouble = (
            f"{server} answers {status} {response.reason_phrase}; trying again until it takes the records"
        )
        return Answer("later", f"status {status}", trouble, _retry_after(response))
    if status == 421:
        return Answer("barred", "host", f"{server} refused records: {_reason(response, said)}")
    if status < 400 or status in _FOREIGN:
        return Answer("barred", "foreign", _foreign_advice(response, said, server))
    refusal = f"{server} refused records: {status} {_reason(response, said)}"
    return Answer(_MENDABLE.get(status, "refused"), f"status {status}", refusal)


def _json_of(response: httpx.Response) -> dict[str, Any] | None:
    """The JSON object of an answer; None where it is something else."""
    try:
        said = response.json()
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _seconds(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_PAUSE_S)


def _retry_after(response: httpx.Response) -> float | None:
    """`Retry-After` in s: a number, or a date by the clock of the server."""
    given = response.headers.get("Retry-After")
    seconds = _seconds(given)
    if given is None or seconds is not None:
        return seconds
    try:
        now = parsedate_to_datetime(response.headers["Date"])
        return _seconds((parsedate_to_datetime(given) - now).total_seconds())
    except (KeyError, TypeError, ValueError):
        return None


def _reason(response: httpx.Response, said: dict[str, Any] | None) -> str:
    reason = (said or {}).get("detail") or (said or {}).get("title") or response.reason_phrase
    return str(reason)[:200]


_HINTS: Final = (
    (("refused",), ". Does `ampwatch serve` run there?"),
    (("not known", "name resolution", "getaddrinfo"), ". Is the name right?"),
    (("WRONG_VERSION_NUMBER", "record layer"), ". It does not speak https; try http://"),
    (
        ("CERTIFICATE_VERIFY",),
        ". SSL_CERT_FILE may name the file of the authority that signed its certificate",
    ),
    (("disconnected", "illegal status"), ". Does it want https://?"),
)


def _hint(text: str) -> str:
    """What the text of a failed connection does not say by itself."""
    return next((hint for signs, hint in _HINTS if any(sign in text for sign in signs)), "")


def _foreign_advice(response: httpx.Response, said: dict[str, Any] | None, server: str) -> str:
    kind = response.headers.get("Content-Type", "").partition(";")[0] or "no content"
    where = response.headers.get("Location")
    answer = f"to {where}" if where else kind if said is None else _reason(response, said)
    return (
        f"{server} does not answer as an ampwatch server does ({response.status_code}, {answer}): the address must be "
        "the one that `ampwatch serve` prints, with its path if it has one"
    )


def _barred(response: httpx.Response, said: dict[str, Any] | None) -> str:
    """The status; of 403 with the reason, as a token may be good for other runs."""
    told = f": {_reason(response, said)}" if response.status_code == 403 and said else ""
    return f"{response.status_code}{told}"


def _token_advice(server: str, token: str | None, told: str) -> str:
    if not token:
        return f"{server} wants a token: set AMPWATCH_TOKEN to one that `ampwatch token create` made there"
    return (
        f"{server} does not accept the token ({told}): set AMPWATCH_TOKEN to one with the scope write, "
        "made there by `ampwatch token create`"
    )
