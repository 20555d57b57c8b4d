"""Sender: one batch to the server, once; what can be mended on the spot is.

A batch that is too large (413) goes in parts, to this server from now on without asking again. One that cannot be
read (415, 426) goes in the next of `ENCODINGS`; the first that is taken is kept.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple

from . import answers, records
from .answers import Answer
from .cuts import Cuts
from .records import Batch

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0
MEDIA_TYPE: Final = "application/vnd.ampwatch.batch"


class _Encoding(NamedTuple):
    headers: Mapping[str, str]
    pack: Callable[[bytes], bytes]


def _gzipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


def _plain(data: bytes) -> bytes:
    return data


ENCODINGS: Final = (
    _Encoding({"Content-Type": MEDIA_TYPE, "Content-Encoding": "gzip"}, _gzipped),
    _Encoding({"Content-Type": MEDIA_TYPE}, _plain),
    _Encoding({"Content-Type": "application/msgpack"}, _plain),
)


class Sender:
    """Posts batches to `{server}/v1/batches`. Several threads may share one; a context manager.

    Arguments:
        server: an address that `answers.why_not` has nothing against.
        token: sent as `Authorization: Bearer`.
        http: transport of httpx in place of the network.
    """

    def __init__(self, server: str, token: str | None, *, http: httpx.BaseTransport | None = None) -> None:
        import httpx  # here, as it takes 50 ms and a job without a server needs none

        self.server, self._token = server.rstrip("/"), token
        self._client = httpx.Client(
            transport=http,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=answers.may_be_proxied(server),
        )
        self._encoding = 0
        self._too_large: float = float("inf")  # bytes of the smallest body that was

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def send(self, batch: Batch, cuts: Cuts) -> Answer:
        """Post a batch, in parts where it was cut or must be.

        Of the answers to parts it is the first that asks to come again, else the first refusal, else the last.
        """
        parts = cuts.of(batch)
        if not parts:
            answer = self._send_whole(batch)
            if answer.outcome != "too large":
                return answer
            parts = cuts.cut(batch)
            if not parts:
                return answer._replace(outcome="refused")
        refusal = None
        for part in parts:
            answer = self.send(part, cuts)
            if answer.outcome in ("later", "barred"):
                return answer
            refusal = refusal or (answer if answer.outcome == "refused" else None)
        return refusal or answer

    def knock(self) -> Answer:
        """Post a body in which nothing is: "refused" is what a server answers that is there and takes the token."""
        return self._post(b"", ENCODINGS[1])

    def _send_whole(self, batch: Batch) -> Answer:
        """Post a batch in the first encoding, from the one kept on, that the server can read."""
        data = records.to_bytes(batch)
        for number in range(self._encoding, len(ENCODINGS)):
            answer = self._post(data, ENCODINGS[number])
            if answer.outcome != "unread":
                self._encoding = number
                return answer
        self._encoding = 0
        # 426 says that the server is too old for the format: it may be upgraded. 415 says nothing of the kind.
        return answer._replace(outcome="barred" if answer.status == 426 else "refused")

    def _post(self, data: bytes, encoding: _Encoding) -> Answer:
        import httpx

        body = encoding.pack(data)
        if len(body) >= self._too_large:
            return Answer("too large", "status 413", f"{self.server} takes no batch of {len(body):,} bytes")
        try:
            response = self._client.post(
                f"{self.server}/v1/batches", content=body, headers=dict(encoding.headers)
            )
        except httpx.HTTPError as error:
            return answers.failed(error, self.server)
        answer = answers.read(response, self.server, self._token)
        if answer.outcome == "too large":
            self._too_large = len(body)
        return answer
