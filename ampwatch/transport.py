"""Transport: batches to the server, by one daemon thread, at least once each.

| answer | what is done |
|---|---|
| 2xx | delivered; the next burst after the `next_batch_s` that the server asks for |
| no connection, 408, 429, 5xx | the same batch again after 0.5, 1, 2 … 60 s with jitter, or after `Retry-After` |
| 401, 403 | one warning that says what to do; the same batch again every 5 minutes |
| any other 4xx | refused for good: counted, one warning for each status, on with the next batch |

The queue is bounded in bytes. What does not fit, and what was on its way when the queue was full, is read again
from the spool once the queue is empty.
"""

from __future__ import annotations

import gzip
import ipaddress
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from . import records
from .guard import guard
from .records import Batch

if TYPE_CHECKING:
    import httpx

QUEUE_BYTES: Final = 16 << 20
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 60.0
UNAUTHORISED_RETRY_S: Final = 300.0
TIMEOUT_S: Final = 30.0
MEDIA_TYPE: Final = "application/vnd.ampwatch.batch"
_log = logging.getLogger("ampwatch")


class Transport:
    """Posts batches to `{server}/v1/batches` until it is closed.

    Arguments:
        server: http:// or https:// address. A token is never sent over plain http to another machine: such an
            address, or one that is none, gives one warning and nothing is sent.
        token: sent as `Authorization: Bearer`.
        reread: gives the producer's spooled batches, for those that did not fit into the queue.
        http: transport of httpx in place of the network.
        first_retry_s, unauthorised_retry_s: wait before the first retry, and after a token was refused.
        queue_bytes: bound of the bodies that wait in memory.
    """

    def __init__(
        self,
        server: str,
        token: str | None,
        *,
        reread: Callable[[], Iterable[Batch]] | None = None,
        http: httpx.BaseTransport | None = None,
        first_retry_s: float = FIRST_RETRY_S,
        unauthorised_retry_s: float = UNAUTHORISED_RETRY_S,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._server, self._token, self._http = server.rstrip("/"), token, http
        self._reread = reread or tuple
        self._first_retry_s, self._unauthorised_retry_s = first_retry_s, unauthorised_retry_s
        self._queue_bytes = queue_bytes
        self._queue: deque[Batch] = deque()
        self._queued_bytes = 0
        self._missed: set[int] = set()
        self._busy = False
        self._wake = threading.Condition()
        self._hurry = False  # close() is waiting: no pauses between bursts
        self._closed = False
        self._unauthorised = False
        self._warned: set[str] = set()
        self._thread: threading.Thread | None = None
        self.delivered = 0
        self.rejected = 0
        self.refusal = why_not(server)
        if self.refusal:
            _log.warning("%s. Training goes on, nothing is sent.", self.refusal)

    def submit(self, batch: Batch) -> bool:
        """Queue a batch; False if it did not fit (it is read from the spool later). Never blocks on the network."""
        if self.refusal:
            return False
        with self._wake:
            fits = self._queued_bytes + len(batch.body) <= self._queue_bytes
            if fits:
                self._queue.append(batch)
                self._queued_bytes += len(batch.body)
            else:
                self._missed.add(batch.seq)
            self._wake.notify_all()
        self._start()
        return fits

    def close(self, timeout_s: float) -> bool:
        """Send what is queued, for at most `timeout_s`, and stop; True if everything was answered.

        A server that refuses the token is not waited for.
        """
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._hurry = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._idle() or self._unauthorised, deadline - time.monotonic())
            done = self._idle()
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None and done:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="ampwatch-transport", daemon=True)
            self._thread.start()

    def _idle(self) -> bool:
        return not (self._queue or self._missed or self._busy)

    def _loop(self) -> None:
        import httpx  # here, as it takes 50 ms and a job without a server needs none

        headers = {"Content-Type": MEDIA_TYPE, "Content-Encoding": "gzip"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        # A proxy of the environment would be handed the token on the way to this machine itself.
        proxies = not is_loopback(urlsplit(self._server).hostname or "")
        with httpx.Client(
            transport=self._http, headers=headers, timeout=TIMEOUT_S, trust_env=proxies
        ) as client:
            while not self._closed:
                pause_s = LONGEST_RETRY_S  # after a failure of our own
                with guard("transport.burst"):
                    pause_s = self._burst(client)
                self._pause(pause_s)

    def _burst(self, client: httpx.Client) -> float:
        """Send everything there is; answer how long to pause before the next burst, in s."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._queue or self._missed)
        pause_s = 0.0
        while batch := self._next():
            try:
                pause_s = self._deliver(client, batch)
            finally:
                self._done()
        if self._missed:
            self._send_missed(client)
        return pause_s

    def _next(self) -> Batch | None:
        with self._wake:
            if self._closed or not self._queue:
                return None
            self._busy = True
            batch = self._queue.popleft()
            self._queued_bytes -= len(batch.body)
            return batch

    def _done(self) -> None:
        with self._wake:
            self._busy = False
            self._wake.notify_all()

    def _send_missed(self, client: httpx.Client) -> None:
        """Send what did not fit, from the spool; what the spool no longer holds has been dropped there."""
        with self._wake:
            missed = set(self._missed)
        try:
            for batch in self._reread():
                if batch.seq in missed and not self._closed:
                    self._deliver(client, batch)
        finally:
            with self._wake:
                self._missed -= missed
                self._wake.notify_all()

    def _deliver(self, client: httpx.Client, batch: Batch) -> float:
        """Post one batch until it is stored, refused for good, or the transport closed; answer `next_batch_s`."""
        body = gzip.compress(records.to_bytes(batch), compresslevel=1)
        retry_s = self._first_retry_s
        while not self._closed:
            response = self._post(client, body)
            self._note_authorisation(response)
            if response is not None and response.is_success:
                self.delivered += 1
                return _next_batch_s(response)
            if response is not None and not _passing(response.status_code):
                self._reject(response)
                return 0.0
            self._pause(self._retry_s(response, retry_s))
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        return 0.0

    def _post(self, client: httpx.Client, body: bytes) -> httpx.Response | None:
        import httpx

        try:
            return client.post(f"{self._server}/v1/batches", content=body)
        except httpx.TransportError as error:
            self._warn("connection", f"{self._server} cannot be reached ({error}); trying again until it can")
            return None

    def _note_authorisation(self, response: httpx.Response | None) -> None:
        with self._wake:
            self._unauthorised = response is not None and response.status_code in (401, 403)
            self._wake.notify_all()

    def _retry_s(self, response: httpx.Response | None, retry_s: float) -> float:
        if response is not None and response.status_code in (401, 403):
            self._warn("token", _token_advice(self._server, self._token, response.status_code))
            return self._unauthorised_retry_s
        if response is not None and response.headers.get("Retry-After", "").isdigit():
            return float(response.headers["Retry-After"])
        return retry_s * random.SystemRandom().uniform(0.5, 1.0)  # draws nothing from a seeded generator

    def _reject(self, response: httpx.Response) -> None:
        self.rejected += 1
        self._warn(
            f"status {response.status_code}",
            f"{self._server} refused a batch with status {response.status_code}: {response.text[:200]}",
        )

    def _pause(self, seconds: float) -> None:
        """Wait, unless close() hurries: then a retry still waits a little, so as not to hammer the server."""
        if seconds <= 0:
            return
        with self._wake:
            if not self._hurry:
                self._wake.wait_for(lambda: self._closed or self._hurry, seconds)
            else:
                self._wake.wait_for(lambda: self._closed, min(seconds, self._first_retry_s))

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("%s. Training goes on.", message)


def why_not(server: str) -> str:
    """Why nothing is sent to this address; empty if it can be."""
    try:
        parts = urlsplit(server)
        host = parts.hostname or ""
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https"):
        return f"server {server!r} is not an address such as https://ampwatch.example.org"
    if parts.scheme == "http" and not is_loopback(host):
        return f"server {server} is another machine and not https: whoever listens could read the token"
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _passing(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in (401, 403, 408, 429) or status >= 500


def _next_batch_s(response: httpx.Response) -> float:
    """The pause that the server asks for, in s; 0 where its answer cannot be read."""
    try:
        answer: Any = response.json()
        return min(float(answer["next_batch_s"]), LONGEST_RETRY_S)
    except (ValueError, KeyError, TypeError):
        return 0.0


def _token_advice(server: str, token: str | None, status: int) -> str:
    if not token:
        return f"{server} wants a token: set AMPWATCH_TOKEN to one that `ampwatch token create` made there"
    return (
        f"{server} does not accept the token ({status}): set AMPWATCH_TOKEN to one with the scope write, "
        "made there by `ampwatch token create`"
    )
