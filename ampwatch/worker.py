"""The recorder's thread: harvests, packs, spools, sends, diagnoses, and says the verdict at the end."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
import numpy as np

from . import records, spool
from .errors import RunNotFound, SpoolError
from .guard import failures, guard
from .joblog import JobLog, Place
from .notices import warn
from .records import Batch, Event, Table
from .settings import PREFIX, Settings
from .spool import Dropped, SpoolWriter
from .transport import Transport

if TYPE_CHECKING:
    import httpx

    from .diagnosis.findings import Finding

BATCH_BYTES: Final = 4 << 20
HEARTBEAT_S: Final = 10.0
FINISH_S: Final = 15.0
SEND_AT_FINISH_S: Final = 4.0
MAX_PENDING_EVENTS: Final = 1 << 16
UNTIL_FAILURE: Final = "up to where writing failed"
WITHIN_BOUND: Final = f"as far as {PREFIX}SPOOL_MAX_BYTES left room"


@dataclass(frozen=True)
class Harvest:
    """Rows and events that a source has completed since the harvest before; `is_last`: nothing will ever follow."""

    attempts: Table | None = None
    tensors: Table | None = None
    events: list[Event] = field(default_factory=list)
    is_last: bool = False


class Source(Protocol):
    """What the recorder harvests. Called on the recorder's thread: reads plain memory, calls no torch."""

    def harvest(self, final: bool) -> Harvest:
        """The complete rows and events; `final` where nothing follows."""


class Worker:
    """One producer's queue and the daemon thread that empties it, at least every `settings.flush_s`.

    Every batch goes to the spool first, then to the server (if one is set), then to the diagnosis. None of the
    three can stop another. Without a spool (an unwritable folder, a full disk: one warning) the rest goes on, and
    so it does where the spool has no more room (`settings.spool_max_bytes`: one warning).

    Arguments:
        settings, run, producer, rank: as in `Recorder`.
        sources: harvested in this order; the list may grow, and what has given its last harvest is removed from it.
        describe: gives the data of the `run` event, called on the thread.
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
        self._stop = threading.Event()
        self._reason = ""
        self._spool: SpoolWriter | None = None
        self._part = ""  # what of the run is kept on disk, where that is not all of it
        self._transport = self._make_transport(http)
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

    def finish(self, reason: str) -> None:
        """Flush, close and say the verdict, on the thread; wait for it up to `FINISH_S`."""
        self._reason = reason
        self._stop.set()
        if threading.current_thread() is self._thread:  # a listener has called finish()
            return
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            warn("the last records of run %s were not written within %g s", self._run, FINISH_S)

    def _loop(self) -> None:
        with guard("recorder.open"):
            self._open()
        while not self._stop.wait(self._settings.flush_s):
            self._flush()
        self._flush(final=True)
        with guard("recorder.close"):
            self._close()

    def _open(self) -> None:
        try:
            self._spool = SpoolWriter(
                self._settings.dir, self._run, self._producer, max_bytes=self._settings.spool_max_bytes
            )
        except SpoolError as error:
            self._do_without_spool(str(error))

    def _flush(self, final: bool = False) -> None:
        with guard("recorder.flush", self._fault):
            harvests = self._harvest(final)
            events = [
                *self._description(),
                *self._queued(),
                *(event for harvest in harvests for event in harvest.events),
            ]
            if final:
                events.append(Event("finish", self._clock(), data=self._end()))
            batches = list(self._pack(events, harvests)) or self._heartbeat()
            if batches:
                self._last_batch = self._clock()
                self._deliver(batches)
                self._joblog.add(batches, self._fault, say=not final)

    def _harvest(self, final: bool) -> list[Harvest]:
        harvests = []
        for source in list(self._sources):
            with guard("recorder.harvest", self._fault):
                harvests.append(source.harvest(final))
                if harvests[-1].is_last:
                    self._sources.remove(source)
                self._joblog.count(harvests[-1].attempts)
        return harvests

    def _pack(self, events: list[Event], harvests: list[Harvest]) -> Iterator[Batch]:
        if events:
            yield self._pack_events(events)
        for harvest in harvests:
            yield from self._pack_table("attempts", harvest.attempts)
        for harvest in harvests:
            yield from self._pack_table("tensors", harvest.tensors)

    def _heartbeat(self) -> list[Batch]:
        if self._clock() - self._last_batch < HEARTBEAT_S:
            return []
        return [self._pack_events([Event("heartbeat", self._clock())])]

    def _description(self) -> Iterator[Event]:
        if not self._described:
            self._described = True
            with guard("recorder.describe", self._fault):
                yield Event("run", self._begun, data=self._describe())

    def _queued(self) -> Iterator[Event]:
        while self._events:
            yield self._events.popleft()
        if self._refused_events:
            count, self._refused_events = self._refused_events, 0
            lost = {"kind": "events", "first_seq": -1, "last_seq": -1, "reason": "queue full", "count": count}
            yield Event("dropped", self._clock(), data=lost)

    def _end(self) -> dict[str, Any]:
        return {"reason": self._reason, **self._joblog.counts, "faults": sum(failures.values())}

    def _pack_events(self, events: list[Event]) -> Batch:
        return records.pack_events(events, **self._key())

    def _pack_table(self, kind: Literal["attempts", "tensors"], table: Table | None) -> Iterator[Batch]:
        for part in _parts(table or {}):
            yield records.pack_table(kind, part, **self._key())

    def _key(self) -> dict[str, Any]:
        return {"producer": self._producer, "seq": next(self._seq), "run": self._run, "rank": self._rank}

    def _deliver(self, batches: list[Batch]) -> None:
        spooled = self._write(batches)
        if self._transport is None:
            return
        refused = [batch for batch in batches if not self._transport.submit(batch)]
        lost = [batch for batch in refused if batch.seq not in spooled]
        self._drop(Dropped(b.kind, b.seq, b.seq, "queue full and not spooled") for b in lost)

    def _write(self, batches: list[Batch]) -> set[int]:
        """Spool the batches; answer the sequence numbers of those that the spool has taken."""
        if self._spool is None:
            return set()
        try:
            dropped = self._spool.write(batches)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._spool.close()
            self._spool = None
            self._do_without_spool(f"{self._settings.dir} cannot be written any more: {error.strerror}")
            return set()
        if dropped:
            self._tell_full()
            self._drop(dropped)
        return {batch.seq for batch in batches if not any(each.holds(batch) for each in dropped)}

    def _drop(self, dropped: Iterable[Dropped]) -> None:
        for each in dropped:
            self.put("dropped", data=each._asdict())

    def _fault(self, where: str, error: Exception, count: int) -> None:
        self.put("fault", data={"where": where, "error": repr(error), "count": count})

    def _close(self) -> None:
        if self._events:  # what the last flush itself had to say
            self._deliver([self._pack_events(list(self._queued()))])
        if self._spool is not None:
            self._spool.close()
        is_sent = self._transport is None or self._transport.close(SEND_AT_FINISH_S)
        is_told = self._joblog.say_verdict(self._place(is_sent))
        if self._transport is not None and not (is_sent or is_told or self._transport.has_warned):
            kept = "kept in part" if self._part else f"kept in {self._settings.dir}"
            warn("the server did not take the last records within %g s; they are %s", SEND_AT_FINISH_S, kept)

    def _make_transport(self, http: httpx.BaseTransport | None) -> Transport | None:
        settings = self._settings
        if not settings.server:
            return None
        made = Transport(
            settings.server, settings.token, meanwhile=self._meanwhile, reread=self._reread, http=http
        )
        return None if made.refusal else made

    def _reread(self) -> Iterator[Batch]:
        """What the spool holds of this producer: nothing, where it could not write."""
        with contextlib.suppress(RunNotFound):
            yield from spool.read(self._folder)

    @property
    def _folder(self) -> Path:
        return self._settings.dir / self._run / self._producer

    def _do_without_spool(self, why: str) -> None:
        self._part = UNTIL_FAILURE
        warn("%s. %s", why, self._meanwhile())

    def _tell_full(self) -> None:
        """Say it at the first drop: what other runs take up is left alone, so only a person can make room."""
        if self._part:
            return
        self._part = WITHIN_BOUND
        message = (
            "%s is full: all runs there together may take %s bytes. Of this run tensor statistics and attempts are"
            " dropped, events are kept. Delete the folders of old runs in it, or raise %sSPOOL_MAX_BYTES. %s"
        )
        settings = self._settings
        warn(message, settings.dir, f"{settings.spool_max_bytes:,}", PREFIX, self._meanwhile())

    def _meanwhile(self) -> str:
        if not self._part:
            return f"Training goes on, and the records are kept in {self._settings.dir}"
        if self._spool is not None:
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
            directory=settings.dir if self._folder.exists() else None,
            run=self._run,
            part=self._part,
        )


def _parts(table: Table) -> Iterator[Table]:
    """The table cut into runs of rows of at most `BATCH_BYTES`."""
    rows = len(table["attempt"]) if table else 0
    if not rows:
        return
    row_bytes = sum(np.asarray(column).nbytes for column in table.values()) // rows
    step = max(1, BATCH_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield {name: column[start : start + step] for name, column in table.items()}
