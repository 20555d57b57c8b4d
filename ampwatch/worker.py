"""The recorder's thread: harvests, packs, spools, sends, diagnoses, and says the verdict at the end."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
import numpy as np

from . import records, tombstones
from .answers import Answer
from .cuts import Cuts
from .guard import failures, guard
from .joblog import JobLog, Place
from .keeper import Keeper, refusal
from .node import Node
from .notices import warn
from .records import Batch, Event, Table
from .run_length import Coder
from .settings import Settings
from .spool import Tail
from .spool_writer import Dropped
from .transport import Transport

if TYPE_CHECKING:
    import httpx

    from .diagnosis.findings import Finding

BATCH_BYTES: Final = 512 << 10  # below what proxies take by default, which is 1 MiB
AT_ONCE_BYTES: Final = 1 << 20  # of batches that are packed before the first of them is let go
HEARTBEAT_S: Final = 10.0
FINISH_S: Final = 15.0
SEND_AT_FINISH_S: Final = 4.0
SHARE_S: Final = 0.05
MAX_PENDING_EVENTS: Final = 1 << 16


@dataclass(frozen=True)
class Harvest:
    """Rows and events that a source has completed since the harvest before.

    `is_last`: nothing will ever follow. `has_more`: more of them wait than one harvest gives; to be asked for at once.
    """

    attempts: Table | None = None
    tensors: Table | None = None
    events: list[Event] = field(default_factory=list)
    is_last: bool = False
    has_more: bool = False


class Source(Protocol):
    """What the recorder harvests. Called on the recorder's thread: reads plain memory, calls no torch."""

    def harvest(self, final: bool) -> Harvest:
        """The complete rows and events; `final` where nothing follows."""


class Worker:
    """One producer's queue and the daemon thread that empties it, at least every `settings.flush_s`.

    Every batch goes to the spool first, then to the server (if one is set), then to the diagnosis. None of the
    three can stop another; what is done without a spool, or where it has no room, says keeper.py.

    Arguments:
        settings, run, producer, rank: as in `Recorder`.
        sources: harvested in this order; the list may grow, and what has given its last harvest is removed from it.
        describe: gives the data of the `run` event, called on the thread.
        node: the processes of this machine, where one of them sends for all.
        listeners: called with each fatal finding.
        clock: Unix time in seconds.
        http: transport of httpx in place of the network, for tests.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        run: str,
        producer: str,
        rank: int,
        sources: list[Source],
        describe: Callable[[], dict[str, Any]],
        node: Node | None = None,
        listeners: Sequence[Callable[[Finding], object]] = (),
        clock: Callable[[], float] = time.time,
        http: httpx.BaseTransport | None = None,
    ) -> None:
        self._settings, self._sources, self._describe = settings, sources, describe
        self._clock = clock
        self._run, self._producer, self._rank = run, producer, rank
        self._events: deque[Event] = deque()
        self._refused_events = 0
        self._seq = itertools.count()
        self._begun = self._last_batch = clock()
        self._described = False
        self._failed = 0  # failures of ours that the last description told
        self._stop = threading.Event()
        self._reason = ""
        self._keeper = Keeper(settings, run, producer, lambda what: warn("%s. %s", what, self._meanwhile()))
        self._tail = Tail(self._keeper.folder)
        self._last_seq = -1
        self._coder = Coder()
        self._refused: deque[tuple[Batch, Answer]] = deque()
        self._http, self._node = http, node
        self._transport = self._make_transport() if node is None or node.is_sender else None
        self._others = self._make_transport_of_others() if self._transport is not None else None
        self._joblog = JobLog(rank == 0 and not settings.quiet, listeners)
        self._thread = threading.Thread(target=self._loop, name="ampwatch-recorder", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def describe_again(self) -> None:
        """Let the next flush begin with a `run` event: the description has changed."""
        self._described = False

    def put(
        self, type: str, *, attempt: int = -1, step: int = -1, stream: int = -1, data: dict[str, Any]
    ) -> None:
        """Queue an event. Any thread, never blocks; beyond `MAX_PENDING_EVENTS` it is counted and dropped.

        Errors: TypeError where `data` holds what a record cannot.
        """
        if len(self._events) >= MAX_PENDING_EVENTS:
            self._refused_events += 1
            return
        # A copy, as the caller's lists may change until the next flush; and what cannot be packed fails here.
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(data))
        self._events.append(Event(type, self._clock(), attempt, step, stream, data=kept))

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended yet."""
        return self._thread.is_alive()

    def stop(self, reason: str) -> None:
        """Let the thread flush, close and say the verdict; what it was told first stands."""
        self._reason = self._reason or reason
        self._stop.set()

    def finish(self, reason: str) -> None:
        """Flush, close and say the verdict, on the thread; wait for it up to `FINISH_S`."""
        self.stop(reason)
        if threading.current_thread() is self._thread:  # a listener has called finish()
            return
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            warn("the last records of run %s were not written within %g s", self._run, FINISH_S)

    def _loop(self) -> None:
        with guard("recorder.open"):
            self._keeper.open()
        while not self._stop.wait(self._settings.flush_s):
            self._flush()
        self._flush(final=True)
        with guard("recorder.close"):
            self._close()

    def _flush(self, final: bool = False) -> None:
        with guard("recorder.flush", self._fault):
            self._take_refused()
            with guard("recorder.node", self._fault):
                self._share()
            harvests = self._harvest(final)
            events = [
                *self._description(final),
                *self._queued(),
                *(event for harvest in harvests for event in harvest.events),
            ]
            if final:
                events.append(Event("finish", self._clock(), data=self._end()))
            if not events and not any(h.attempts or h.tensors for h in harvests):
                events = self._heartbeat()
                if not (events or self._coder.is_due):
                    return
            self._send_off(events, harvests, final=final)
            while any(harvest.has_more for harvest in harvests):
                harvests = self._harvest(final)
                more = [event for harvest in harvests for event in harvest.events]
                self._send_off(more, harvests, final=final)
            self._joblog.judge(self._fault, final=final)

    def _send_off(
        self, events: list[Event], harvests: Sequence[Harvest] = (), *, final: bool = False
    ) -> None:
        """Pack and deliver these, and what there is to tell of losses, which is told again until it is kept.

        A few at a time: of a flush of 16 MiB, all packed, framed and decoded beside each other would be 100.
        """
        told = self._keeper.lost.take()
        mourned = [tombstones.event(each, self._clock()) for each in told]
        lost = set[str]()
        coded = self._coder.code([*events, *mourned], final=final)
        for batches in _some(self._pack(coded, harvests)):
            self._last_batch = self._clock()
            self._last_seq = batches[-1].seq
            lost.update(batch.kind for batch in self._deliver(batches))
            self._joblog.add(batches, self._fault)
        if "events" in lost:
            self._keeper.lost.add(told)
        if self._coder.waiting:
            self._keeper.hold(records.pack_events(self._coder.waiting, **self._key(self._last_seq + 1)))

    def _harvest(self, final: bool) -> list[Harvest]:
        harvests = []
        for source in list(self._sources):
            with guard("recorder.harvest", self._fault):
                harvests.append(source.harvest(final))
                if harvests[-1].is_last:
                    self._sources.remove(source)
                self._joblog.count(harvests[-1].attempts)
        return harvests

    def _pack(self, events: list[Event], harvests: Sequence[Harvest]) -> Iterator[Batch]:
        for group in _groups(events):
            yield records.pack_events(group, **self._key())
        for harvest in harvests:
            yield from self._pack_table("attempts", harvest.attempts)
        for harvest in harvests:
            yield from self._pack_table("tensors", harvest.tensors)

    def _heartbeat(self) -> list[Event]:
        since_s = self._clock() - self._last_batch
        is_due = not 0 <= since_s < HEARTBEAT_S  # a clock may step back
        return [Event("heartbeat", self._clock())] if is_due else []

    def _description(self, final: bool) -> Iterator[Event]:
        """The `run` event: at first, when it has changed, and as failures of ours become twice as many."""
        failed = sum(failures.values())
        if not self._described or failed > (self._failed if final else 2 * self._failed):
            self._described, self._failed = True, failed
            data: dict[str, Any] = {}
            with guard("recorder.describe", self._fault):
                data = self._describe()
            yield Event("run", self._begun, data=data | {"faults": dict(failures)})

    def _queued(self) -> Iterator[Event]:
        while self._events:
            yield self._events.popleft()
        if self._refused_events:
            count, self._refused_events = self._refused_events, 0
            lost = {"kind": "events", "first_seq": -1, "last_seq": -1, "reason": "queue full", "count": count}
            yield Event("dropped", self._clock(), data=lost)

    def _end(self) -> dict[str, Any]:
        return {"reason": self._reason, **self._joblog.counts, "faults": sum(failures.values())}

    def _pack_table(self, kind: Literal["attempts", "tensors"], table: Table | None) -> Iterator[Batch]:
        for part in _parts(table or {}):
            yield records.pack_table(kind, part, **self._key())

    def _key(self, seq: int | None = None) -> dict[str, Any]:
        seq = next(self._seq) if seq is None else seq
        return {"producer": self._producer, "seq": seq, "run": self._run, "rank": self._rank}

    def _deliver(self, batches: list[Batch]) -> list[Batch]:
        """Spool and send; those that neither disk nor server took."""
        spooled = self._keeper.write(batches)
        lost = [batch for batch in batches if not self._submit(batch, is_spooled=batch.seq in spooled)]
        self._keeper.miss(lost, "queue full and not spooled" if self._transport else "not spooled")
        if self._transport is not None:
            self._keeper.forget(self._transport.answered_seq)
        return lost

    def _submit(self, batch: Batch, *, is_spooled: bool) -> bool:
        """Send a batch, if there is a server; whether it is kept anywhere."""
        is_queued = self._transport is not None and self._transport.submit(batch, is_spooled=is_spooled)
        return is_queued or is_spooled

    def _share(self) -> None:
        """Send what the others of this machine record; or for ourselves, where nobody does it for us."""
        if self._node is None:
            return
        self._node.stay()
        if self._others is not None:
            self._node.forward(partial(self._others.submit, is_spooled=False))
        elif self._transport is None and not (self._node.is_served and self._keeper.is_writing):
            self._transport = self._make_transport()
            if self._transport is not None:
                self._transport.catch_up(self._last_seq)

    def _wait_for_others(self) -> None:
        """Wait a bounded time for what the other processes of this machine still write."""
        if self._node is None or self._others is None:
            return
        deadline = time.monotonic() + SEND_AT_FINISH_S
        while time.monotonic() < deadline:
            self._node.forward(partial(self._others.submit, is_spooled=False))
            if self._node.is_alone:
                break
            time.sleep(SHARE_S)
        self._others.close(max(0.0, deadline - time.monotonic()))

    def _take_refused(self) -> None:
        while self._refused:
            batch, answer = self._refused.popleft()
            self._keeper.reject(batch, answer.status)

    def _fault(self, where: str, error: Exception, count: int) -> None:
        self.put("fault", data={"where": where, "error": repr(error), "count": count})

    def _close(self) -> None:
        with guard("recorder.node"):
            self._wait_for_others()
        events = list(self._queued())
        # What the last flush itself had to say, and what was refused of others.
        if events or self._keeper.lost:
            self._send_off(events, final=True)
            self._joblog.judge(self._fault, final=True)
        with guard("recorder.close_spool"):
            self._keeper.close()
        is_sent = self._transport is None or self._transport.close(SEND_AT_FINISH_S)
        if self._node is not None:
            with guard("recorder.node"):
                self._node.leave()
        is_told = self._joblog.say_verdict(self._place(is_sent))
        if self._transport is not None and not (is_sent or is_told or self._transport.warned):
            kept = "kept in part" if self._keeper.part else f"kept in {self._settings.dir}"
            warn("the server did not take the last records within %g s; they are %s", SEND_AT_FINISH_S, kept)

    def _make_transport(self) -> Transport | None:
        settings = self._settings
        if not settings.server:
            return None
        made = Transport(
            settings.server,
            settings.token,
            meanwhile=self._meanwhile,
            reread=self._reread,
            cuts=Cuts(self._keeper.folder, lambda: next(self._seq)),
            refused=lambda batch, answer: self._refused.append((batch, answer)),
            http=self._http,
        )
        return None if made.refusal else made

    def _make_transport_of_others(self) -> Transport | None:
        """One that cuts nothing, as numbers are their producers' to give, and warns of nothing that was told.

        What is refused stays in the spool of its producer, which does not hear of it: the tombstone is ours.
        """
        settings = self._settings
        if self._transport is None or self._node is None:
            return None
        return Transport(
            settings.server or "",
            settings.token,
            meanwhile=self._meanwhile,
            refused=self._refused_of_others,
            forgotten=self._node.forward_again,
            http=self._http,
            warned=self._transport.warned,
        )

    def _reread(self, again: bool) -> Iterator[Batch]:
        """Transport's thread: what it has not read yet of the spool, or all of it."""
        if again:
            self._tail = Tail(self._keeper.folder)
        return self._tail.read()

    def _refused_of_others(self, batch: Batch, answer: Answer) -> None:
        lost = Dropped(batch.kind, batch.seq, batch.seq, refusal(answer.status))
        self.put("dropped", data=tombstones.event(lost, 0.0).data | {"producer": batch.producer})

    def _meanwhile(self) -> str:
        if not self._keeper.part:
            return f"Training goes on, and the records are kept in {self._settings.dir}"
        if self._keeper.is_writing:
            return f"Training goes on, and the records are kept in part in {self._settings.dir}"
        if self._transport is not None:
            return "Training goes on, and the records go to the server only"
        return "Training goes on, but nothing more of it is kept"

    def _place(self, is_sent: bool) -> Place:
        """Where the run can be seen at its end."""
        settings = self._settings
        url = f"{(settings.server or '').rstrip('/')}/run/{self._run}" if self._transport else ""
        return Place(
            url=url if is_sent else "",
            unsent_to="" if is_sent else settings.server or "",
            directory=settings.dir if self._keeper.folder.exists() else None,
            run=self._run,
            part=self._keeper.part,
        )


def _some(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """The batches in lists of `AT_ONCE_BYTES` or a little more."""
    some: list[Batch] = []
    for batch in batches:
        some.append(batch)
        if sum(len(each.body) for each in some) >= AT_ONCE_BYTES:
            yield some
            some = []
    if some:
        yield some


def _groups(events: list[Event]) -> Iterator[list[Event]]:
    """The events in lists of at most `BATCH_BYTES`; a larger one stands alone."""
    group: list[Event] = []
    size = 0
    for event in events:
        event_bytes = len(msgspec.msgpack.encode(event))
        if group and size + event_bytes > BATCH_BYTES:
            yield group
            group, size = [], 0
        group.append(event)
        size += event_bytes
    if group:
        yield group


def _parts(table: Table) -> Iterator[Table]:
    """The table cut into runs of rows of at most `BATCH_BYTES`."""
    rows = len(table["attempt"]) if table else 0
    if not rows:
        return
    row_bytes = sum(np.asarray(column).nbytes for column in table.values()) // rows
    step = max(1, BATCH_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield {name: column[start : start + step] for name, column in table.items()}
