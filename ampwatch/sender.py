"""Sender: batches to the server, once; what can be mended on the spot is.

A batch that is too large (413) goes in parts, to this server from now on without asking again. One that cannot be
read (415, 426) goes in the next of `ENCODINGS`; the first that is taken is kept. Several go in one request, which is
halved where it is too large; to a server that knows of no such request, they go one by one from then on.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
TOGETHER: Final = "application/vnd.ampwatch.batches"
TOGETHER_BATCHES: Final = 64
TOGETHER_BYTES: Final = 512 << 10  # of bodies, and one more batch: proxies take 1 MiB by default


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


def together(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """The batches in lists, each for one request. Where a reading breaks off, what it gave before is handed on first."""
    some: list[Batch] = []
    try:
        for batch in batches:
            some.append(batch)
            if len(some) == TOGETHER_BATCHES or sum(len(each.body) for each in some) >= TOGETHER_BYTES:
                yield some
                some = []
    except Exception:
        if some:
            yield some
        raise
    if some:
        yield some


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
        self._takes_several = True
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
            if answer.comes_again:
                return answer
            refusal = refusal or (answer if answer.outcome == "refused" else None)
        return refusal or answer

    def send_all(self, batches: Sequence[Batch], cuts: Callable[[Batch], Cuts]) -> list[Answer]:
        """Post batches, in one request where the server takes that.

        Answers of the first ones, in their order: it may end with one that has to come again, behind which none was
        tried. In one request each has its own.

        Arguments:
            cuts: of the producer of a batch.
        """
        is_cut = any(cuts(batch).of(batch) for batch in batches)
        if len(batches) == 1 or is_cut or not self._takes_several:
            return self._one_by_one(batches, cuts)
        answered = self._post_several(batches)
        if not isinstance(answered, Answer):
            return [
                self.send(batch, cuts(batch)) if answer.outcome in ("too large", "unread") else answer
                for batch, answer in zip(batches, answered, strict=True)
            ]
        if answered.outcome == "too large":
            middle = len(batches) // 2
            first = self.send_all(batches[:middle], cuts)
            if any(answer.comes_again for answer in first):
                return first
            return [*first, *self.send_all(batches[middle:], cuts)]
        if answered.comes_again and answered.about != "foreign":
            return [answered]
        alone = self._one_by_one(batches, cuts)
        self._takes_several = alone[0].comes_again  # what is wrong is not the request
        return alone

    def knock(self) -> Answer:
        """Post a body in which nothing is: "refused" is what a server answers that is there and takes the token."""
        return self._post(b"", ENCODINGS[1])

    def _one_by_one(self, batches: Sequence[Batch], cuts: Callable[[Batch], Cuts]) -> list[Answer]:
        told: list[Answer] = []
        for batch in batches:
            told.append(self.send(batch, cuts(batch)))
            if told[-1].comes_again:
                break
        return told

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
        asked = self._ask(data, encoding)
        return asked if isinstance(asked, Answer) else answers.read(asked, self.server, self._token)

    def _post_several(self, batches: Sequence[Batch]) -> list[Answer] | Answer:
        """The answer to each, or to the request."""
        headers, pack = ENCODINGS[self._encoding]
        asked = self._ask(records.join(batches), _Encoding({**headers, "Content-Type": TOGETHER}, pack))
        if isinstance(asked, Answer):
            return asked
        return answers.read_all(asked, len(batches), self.server, self._token)

    def _ask(self, data: bytes, encoding: _Encoding) -> httpx.Response | Answer:
        """The response to a body; the answer where there is none."""
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
        if response.status_code == 413:
            self._too_large = len(body)
        return response
