"""Transport: batches to the server, by one daemon thread, at least once each; what waits goes in one request.

| outcome (answers.py) | what is done |
|---|---|
| stored | delivered; the next burst after the `next_batch_s` that the server asks for. Where it has less of the producer than it had acknowledged, its database was put back: all from there on again, from the spool |
| later | the same batch again after 0.5, 1, 2 … 60 s with jitter, or after `Retry-After` |
| barred | one warning that says what to do; the same batch again every 5 minutes |
| refused | counted and told of, one warning for each status, on with the next batch |

The queue is bounded in bytes. From the first batch that does not fit on, all are read again from the spool, in their
order, until nothing is left behind: an outage of days costs no memory.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Final

from . import answers
from .answers import Answer
from .cuts import Cuts
from .guard import guard
from .notices import warn
from .records import Batch
from .sender import Sender, together

if TYPE_CHECKING:
    import httpx

QUEUE_BYTES: Final = 4 << 20  # what is on the disk as well need not lie in memory
UNSPOOLED_BYTES: Final = 16 << 20
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 60.0
BARRED_RETRY_S: Final = 300.0


class Transport:
    """Posts batches to `{server}/v1/batches` until it is closed.

    Arguments:
        server: http:// or https:// address. A token is never sent over plain http to another machine: such an
            address, or one that is none, gives one warning and nothing is sent.
        token: sent as `Authorization: Bearer`.
        meanwhile: what a warning says of the training and of the records, such as where they are kept.
        reread: gives the spooled batches of the one producer in their order, those that it has not given before, or all
            of them again; for what did not fit into the queue, and what a server has lost. None where there is no
            spool, or more than one.
        forgotten: told on the thread, where `reread` is None, of a producer of which the server has lost something.
        cuts: how batches are cut that are too large.
        refused: told on the thread of each batch that was refused for good.
        warned: what has been warned of already; kept up to date.
        http: transport of httpx in place of the network.
        first_retry_s, barred_retry_s: wait before the first retry, and where a person must do something first.
        queue_bytes, unspooled_bytes: bounds of the bodies that wait in memory: for what is in a spool as well, and for what
            is nowhere else.
    """

    def __init__(
        self,
        server: str,
        token: str | None,
        *,
        meanwhile: Callable[[], str] = lambda: "Training goes on",
        reread: Callable[[bool], Iterable[Batch]] | None = None,
        forgotten: Callable[[str], object] = lambda _producer: None,
        cuts: Cuts | None = None,
        refused: Callable[[Batch, Answer], object] | None = None,
        warned: set[str] | None = None,
        http: httpx.BaseTransport | None = None,
        first_retry_s: float = FIRST_RETRY_S,
        barred_retry_s: float = BARRED_RETRY_S,
        queue_bytes: int = QUEUE_BYTES,
        unspooled_bytes: int = UNSPOOLED_BYTES,
    ) -> None:
        self._server, self._token, self._http = server.rstrip("/"), token, http
        self._meanwhile, self._reread, self._forgotten = meanwhile, reread, forgotten
        self._cuts, self._refused = cuts or Cuts(None), refused
        self._first_retry_s, self._barred_retry_s = first_retry_s, barred_retry_s
        self._queue_bytes, self._unspooled_bytes = queue_bytes, unspooled_bytes
        self._queue: deque[Batch] = deque()
        self._queued_bytes = 0
        self._behind: tuple[int, int] | None = None  # first and last number of what did not fit
        self._acknowledged: dict[str, int] = {}  # by producer, the highest number
        self._again = False  # the server has lost something: the spool is read from its beginning
        self._busy = False
        self._wake = threading.Condition()
        self._hurry = False  # close() is waiting: no pauses between bursts
        self._closed = False
        self._is_hopeless = False  # a try at the end has shown that close() waits in vain
        self.warned: set[str] = set() if warned is None else warned
        self._thread: threading.Thread | None = None
        self.delivered = 0
        self.rejected = 0
        self._answered = -1
        import_module(
            "httpx"
        )  # where this is made: a fork while its thread imports leaves the child half a module
        self.refusal = answers.why_not(server)
        if self.refusal:
            warn("%s. Training goes on, nothing is sent", self.refusal)

    @property
    def answered_seq(self) -> int:
        """Of all spooled batches up to this number none waits for an answer any more."""
        behind = self._behind
        return self._answered if behind is None else min(self._answered, behind[0] - 1)

    def submit(self, batch: Batch, *, is_spooled: bool = True) -> bool:
        """Queue a batch; False if it did not fit, and is read from the spool later. Never blocks on the network.

        One that is not in the spool is queued out of turn, as it could not be read from there.
        """
        if self.refusal:
            return False
        with self._wake:
            in_turn = self._behind is None or not is_spooled
            bound = self._queue_bytes if is_spooled else self._unspooled_bytes
            fits = in_turn and self._queued_bytes + len(batch.body) <= bound
            if fits:
                self._queue.append(batch)
                self._queued_bytes += len(batch.body)
            elif is_spooled:
                self._behind = (self._behind[0] if self._behind else batch.seq, batch.seq)
            self._wake.notify_all()
        self._start()
        return fits

    def catch_up(self, last_seq: int) -> None:
        """Send what the spool holds up to this number, as if it had not fitted into the queue."""
        with self._wake:
            self._behind = (0, last_seq)
            self._wake.notify_all()
        self._start()

    def close(self, timeout_s: float) -> bool:
        """Send what is queued, for at most `timeout_s`, and stop; True if everything was answered.

        Tried once more at once; a server that bars us, or that has never been reached, is not waited for after that.
        """
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._hurry = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._idle() or self._is_hopeless, deadline - time.monotonic())
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
        return not (self._queue or self._behind or self._busy)

    def _loop(self) -> None:
        # What stands in the environment can keep a client from being made: a proxy or certificates that are none.
        with (
            guard("transport.open", then="nothing is sent"),
            Sender(self._server, self._token, http=self._http) as sender,
        ):
            while not self._closed:
                pause_s = LONGEST_RETRY_S  # after a failure of our own
                with guard("transport.burst"):
                    pause_s = self._burst(sender)
                self._pause(pause_s)

    def _burst(self, sender: Sender) -> float:
        """Send everything there is; answer how long to pause before the next burst, in s."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._queue or self._behind)
        pause_s = 0.0
        while some := self._next():
            try:
                pause_s = self._deliver(sender, some)
            finally:
                self._done()
        if self._behind:
            self._catch_up(sender)
        return 0.0 if self._again else pause_s

    def _next(self) -> list[Batch]:
        """What goes in the next request; nothing where nothing waits."""
        with self._wake:
            if self._closed or not self._queue:
                return []
            self._busy = True
            some = next(together(self._queue))
            for batch in some:
                self._queue.popleft()
                self._queued_bytes -= len(batch.body)
            return some

    def _done(self) -> None:
        with self._wake:
            self._busy = False
            self._wake.notify_all()

    def _catch_up(self, sender: Sender) -> None:
        """Send what did not fit, from the spool; what a whole reading of it does not show has been dropped there."""
        assert self._behind is not None
        (first, last), again, self._again = self._behind, self._again, False
        spooled = self._reread(again) if self._reread is not None else ()
        for some in together(batch for batch in spooled if batch.seq >= first):
            self._deliver(sender, some)
            # closed perhaps before all were answered; or the server has lost what was sent meanwhile
            if self._closed or self._again or self._reach(max(batch.seq for batch in some)):
                return
        self._reach(last)

    def _reach(self, seq: int) -> bool:
        """Nothing is behind up to this number; True where nothing is any more."""
        with self._wake:
            if self._behind is not None:
                self._behind = None if seq >= self._behind[1] else (seq + 1, self._behind[1])
            self._wake.notify_all()
            return self._behind is None

    def _deliver(self, sender: Sender, batches: list[Batch]) -> float:
        """Post batches until each is stored, refused for good, or the transport closed; answer `next_batch_s`."""
        retry_s, tries, left = self._first_retry_s, 0, batches
        while not self._closed:
            is_last_try = self._hurry
            told, tries = self._send(sender, left), tries + 1
            self._note(told, tries, is_last_try)
            before, left = len(left), self._settle(left, told)
            if not left:
                self._answered = max(self._answered, *(batch.seq for batch in batches))
                return min(told[-1].pause_s or 0.0, LONGEST_RETRY_S)
            if len(left) < before:
                retry_s, tries = self._first_retry_s, 0
            again = next((answer for answer in told if answer.comes_again), None)
            if again is not None:
                self._pause(self._wait_s(again, retry_s))
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        return 0.0

    def _send(self, sender: Sender, batches: list[Batch]) -> list[Answer]:
        """Answers to the first of these; one that we fail over ourselves is passed over, or it would stop all the others."""
        with guard("transport.send"):
            return sender.send_all(batches, lambda _: self._cuts)
        return [Answer("refused", "own")] if len(batches) == 1 else self._send(sender, batches[:1])

    def _settle(self, batches: list[Batch], told: list[Answer]) -> list[Batch]:
        """Note what became of the first batches; those that are to be sent again, or were not tried."""
        left = []
        for batch, answer in zip(batches, told, strict=False):
            if answer.comes_again:
                left.append(batch)
            elif answer.outcome == "stored":
                self.delivered += 1
                self._acknowledge(batch, answer)
            else:
                self.rejected += 1
                if self._refused is not None:
                    self._refused(batch, answer)
        return left + batches[len(told) :]

    def _acknowledge(self, batch: Batch, answer: Answer) -> None:
        """Note what is stored, and whether something is no more that was."""
        known = self._acknowledged.get(batch.producer, -1)
        self._acknowledged[batch.producer] = max(known, batch.seq)
        if answer.last_seq is None or answer.last_seq >= known:
            return
        lost = f"{self._server} has lost records that it had acknowledged, as one does whose database was put back"
        self._warn(answer._replace(about="lost", warning=f"{lost}; what is left of them here is sent again"))
        if self._reread is None:
            self._forgotten(batch.producer)
            return
        with self._wake:
            first, last = self._behind or (answer.last_seq + 1, known)
            self._behind, self._again = (min(first, answer.last_seq + 1), max(last, known)), True

    def _note(self, told: list[Answer], tries: int, is_last_try: bool) -> None:
        """Warn of answers, the first of each kind; of trouble that has an answer only where it has not passed."""
        for answer in told:
            passes = answer.outcome == "later" and answer.about != "connection" and tries == 1
            if answer.warning and not passes:
                self._warn(answer)
        is_barred = any(answer.outcome == "barred" for answer in told)
        never_reached = told[-1].about == "connection" and not self.delivered
        with self._wake:
            self._is_hopeless = is_last_try and (is_barred or never_reached)
            self._wake.notify_all()

    def _wait_s(self, answer: Answer, retry_s: float) -> float:
        if answer.outcome == "barred":
            return self._barred_retry_s
        if answer.pause_s is not None:
            return answer.pause_s
        return retry_s * random.SystemRandom().uniform(0.5, 1.0)  # draws nothing from a seeded generator

    def _pause(self, seconds: float) -> None:
        """Wait, unless close() hurries: then a retry still waits a little, so as not to hammer the server."""
        if seconds <= 0:
            return
        with self._wake:
            if not self._hurry:
                self._wake.wait_for(lambda: self._closed or self._hurry, seconds)
            else:
                self._wake.wait_for(lambda: self._closed, min(seconds, self._first_retry_s))

    def _warn(self, answer: Answer) -> None:
        if answer.about not in self.warned:
            self.warned.add(answer.about)
            stop = "" if answer.warning.endswith("?") else "."
            warn("%s%s %s", answer.warning, stop, self._meanwhile())
