"""Diagnosis on the server: one engine for each run that grows, kept as a cache that the store can rebuild."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch import records
from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.diagnosis.findings import Finding, Verdict
from ampwatch.diagnosis.rows import ROW
from ampwatch.diagnosis.samples import kept_bytes, kept_of
from ampwatch.records import Array, Batch, Event, Table

from . import tables as t
from .counts import Counts
from .store.blob import pack
from .store.cover import Where
from .store.place import Window, read_at
from .store.points import select
from .store.rows import as_sent
from .store.stats import fitted
from .store.tail import Key

log = logging.getLogger(__name__)

KEPT_BYTES: Final = 1 << 30  # of all engines: rows of attempts, tensors' samples …
ENGINE_BYTES: Final = 1 << 18  # … and the rest of each
WINDOW: Final = (
    1 << 17
)  # attempts of a process whose rows an engine keeps at least, and twice as many at most
_REBUILT_SEQ: Final = 2**62  # batches made of chunks are numbered from here: no sender comes this far
_EVENTS_A_BATCH: Final = 1000

FAILED: Final = Verdict(
    "no data", None, None, "The diagnosis failed on these records; the server's log says why."
)

Result = tuple[list[Finding], Verdict]


class Engine(Protocol):
    """What the server needs of `ampwatch.diagnosis.engine.Diagnosis`."""

    def add(self, batch: Batch) -> None:
        """Take a batch in, in any order."""

    def findings(self) -> list[Finding]:
        """What holds now, the worst first."""

    def verdict(self) -> Verdict:
        """One sentence over the run."""


def windowed() -> Diagnosis:
    """The engine of a server: of a run of any length it keeps the facts, and rows of the newest attempts."""
    return Diagnosis(window=WINDOW)


class _Decoded(Batch, frozen=True):
    """A batch whose table is decoded already; that of `tensors` has the column `shape` beside those that were sent."""

    columns: Table

    def table(self, names: Collection[str] | None = None) -> Table:  # noqa: ARG002 - more of them cost nothing
        return self.columns


def _decoded(batch: Batch) -> tuple[Batch, Array | None]:
    """The batch for several who ask for its table, and of tensors `stats.fitted`."""
    if batch.kind == "events":
        return batch, None
    table = batch.table()
    shape = fitted(table) if batch.kind == "tensors" else None
    header = {name: getattr(batch, name) for name in batch.__struct_fields__}
    return _Decoded(**header, columns=table if shape is None else table | {"shape": shape}), shape


class RunDiagnosis:
    """The engine of one run, which of the waiting batches it has been given, and how far they are counted."""

    def __init__(self, engine: Engine, stored: Iterable[Batch]) -> None:
        # Of tensors what was fitted to their histograms, for chunks too.
        self.given: dict[Key, Array | None] = {}
        self.counts = Counts()
        self._attempts: Counter[str] = Counter()  # by process
        self._sampled = self._rows = 0
        self.is_described = False  # what the run says of itself, or whether it is complete, may have changed
        self.is_unjudged = False  # something came since it was judged last
        self.uncounted: dict[int, Row[Any]] = {}  # the producers of which something came since it was told of
        self.told_at = -math.inf  # monotonic s
        self._engine: Engine | None = engine
        for batch in stored:
            self._add(batch)

    @property
    def size(self) -> int:
        """What it holds, in bytes, about."""
        attempts = sum(min(count, 2 * WINDOW) for count in self._attempts.values())
        return ENGINE_BYTES + ROW.itemsize * attempts + kept_bytes(self._sampled, self._rows)

    def add(self, batches: dict[Key, Batch]) -> None:
        """Give the engine what it has not seen."""
        for key, batch in batches.items():
            if key not in self.given:
                decoded, self.given[key] = _decoded(batch)
                self.counts.note(key[0], decoded)
                self._add(decoded)

    def has_been_told(self, now: float) -> None:
        """Readers know of all that was added so far."""
        self.is_unjudged, self.uncounted, self.told_at = False, {}, now

    def result(self) -> Result | None:
        """Findings and verdict; None where the engine has failed, and what was found before must stand."""
        if self._engine is None:
            return None
        try:
            return self._engine.findings(), self._engine.verdict()
        except Exception:  # noqa: BLE001 - whatever an engine raises, what was ingested must stay readable
            self._give_up()
            return None

    def _add(self, batch: Batch) -> None:
        if self._engine is None:
            return
        try:
            self._measure(batch)
            self._engine.add(batch)
        except Exception:  # noqa: BLE001 - as above
            self._give_up()

    def _measure(self, batch: Batch) -> None:
        if batch.kind == "attempts":
            self._attempts[batch.producer] += len(batch.table(("attempt",))["attempt"])
        elif batch.kind == "tensors":
            attempts = batch.table(("attempt",))["attempt"]
            steps = np.diff(attempts, prepend=-1)
            in_order = (steps >= 0).all()  # as they are sent
            self._sampled += np.count_nonzero(steps) if in_order else len(np.unique(attempts))
            self._rows += len(attempts)

    def _give_up(self) -> None:
        log.exception(
            "the diagnosis of a run failed; the server goes on without it until it is started again"
        )
        self._engine = None


class Diagnoser:
    """The diagnoses of the runs that this server holds a lease on, of those that grew last as many as have room.

    Arguments:
        engine: makes the diagnosis of a run.
        most_bytes: room, about.
    """

    def __init__(self, engine: Callable[[], Engine], most_bytes: int = KEPT_BYTES) -> None:
        self._engine, self._most_bytes = engine, most_bytes
        self._runs: OrderedDict[str, RunDiagnosis] = OrderedDict()
        self._sizes: dict[str, int] = {}  # as they were when each was last asked for
        self._size = 0  # all of them

    def has(self, run: str) -> bool:
        """Whether a run need not be rebuilt."""
        return run in self._runs

    def of(self, connection: Connection, run: str) -> RunDiagnosis:
        """The diagnosis of a run, rebuilt from the store where this server has none."""
        if run not in self._runs:
            self._runs[run] = RunDiagnosis(self._engine(), stored_batches(connection, run))
        self._runs.move_to_end(run)
        size = self._runs[run].size
        self._size += size - self._sizes.get(run, 0)
        self._sizes[run] = size
        while self._size > self._most_bytes and len(self._runs) > 1:
            self.forget(next(iter(self._runs)))
        return self._runs[run]

    def forget(self, run: str) -> None:
        """Drop a run: another server diagnoses it now, it was deleted, or others need the room."""
        if self._runs.pop(run, None) is not None:
            self._size -= self._sizes.pop(run, 0)


def replace_findings(connection: Connection, run: str, findings: list[Finding], verdict: Verdict) -> None:
    """Put the findings and the verdict of a run in the place of those before, all at once.

    Where records are gone by age, what they proved can be found no more, and what was found then stays.
    """
    stale = [t.findings.c.run == run]
    if _is_thinned(connection, run):
        stale.append(t.findings.c.key.in_([finding.key for finding in findings]))
    connection.execute(t.findings.delete().where(*stale))
    rows: list[dict[str, Any]] = [
        {
            "run": run,
            "key": finding.key,
            "place": place,
            "kind": finding.kind,
            "severity": finding.severity,
            "body": pack(finding.as_dict()),
        }
        for place, finding in enumerate({f.key: f for f in findings}.values())
    ]
    if rows:
        connection.execute(t.findings.insert(), rows)
    state = t.run_state.update().where(t.run_state.c.run == run)
    connection.execute(state.values(verdict=pack(verdict.as_dict())))


def _is_thinned(connection: Connection, run: str) -> bool:
    row = t.producers.c
    gone = sa.or_(row.tensors_from > 0, row.attempts_from > 0)
    return connection.execute(sa.select(row.id).where(row.run == run, gone).limit(1)).first() is not None


def note_failure(connection: Connection, run: str) -> None:
    """Say that nothing is known because the diagnosis failed, unless something was found before."""
    mine = sa.and_(t.run_state.c.run == run, t.run_state.c.verdict == pack({}))
    connection.execute(t.run_state.update().where(mine).values(verdict=pack(FAILED.as_dict())))


def stored_batches(connection: Connection, run: str) -> Iterator[Batch]:
    """What a diagnosis asks of a run that lies in rows and chunks, as batches; what waits in the inbox is not among them.

    Of the tensors' rows those that it would keep: the others are most of what is stored.
    """
    query = sa.select(t.producers.c.id, t.producers.c.producer, t.producers.c.rank).where(
        t.producers.c.run == run
    )
    for producer_id, producer, rank in connection.execute(query.order_by(t.producers.c.id)).all():
        numbers = itertools.count(_REBUILT_SEQ)
        header = {"producer": producer, "run": run, "rank": rank}
        for events in _stored_events(connection, producer_id):
            yield records.pack_events(events, seq=next(numbers), **header)
        for place in _level_zero(connection, producer_id, "attempts"):
            for table in as_sent("attempts", _rows(connection, place)):
                yield records.pack_table("attempts", table, seq=next(numbers), **header)
        for rows in _kept_tensors(connection, producer_id):
            for table in as_sent("tensors", rows):
                yield records.pack_table("tensors", table, seq=next(numbers), **header)


def _stored_events(connection: Connection, producer_id: int) -> Iterator[list[Event]]:
    query = sa.select(t.events.c.body).where(t.events.c.producer == producer_id)
    decoder = msgspec.msgpack.Decoder(Event)
    for part in connection.scalars(query.order_by(t.events.c.seq, t.events.c.place)).partitions(
        _EVENTS_A_BATCH
    ):
        yield [decoder.decode(body) for body in part]


def _kept_tensors(connection: Connection, producer_id: int) -> Iterator[Table]:
    sampled = {
        place: np.unique(_rows(connection, place, {"attempt"})["attempt"])
        for place in _level_zero(connection, producer_id, "tensors")
    }
    kept = kept_of({attempt for attempts in sampled.values() for attempt in attempts.tolist()})
    wanted = np.array(sorted(kept), dtype=np.int64)
    for place, attempts in sampled.items():
        if np.isin(attempts, wanted).any():
            table = _rows(connection, place)
            yield select(table, np.isin(table["attempt"], wanted))


def _level_zero(connection: Connection, producer_id: int, kind: str) -> list[Window]:
    """The windows of a producer that have chunks of rows, in order."""
    mine = sa.and_(t.chunks.c.producer == producer_id, t.chunks.c.kind == kind, t.chunks.c.level == 0)
    order = (t.chunks.c.first, t.chunks.c.stream)
    found = connection.execute(sa.select(*order).where(mine).order_by(*order)).all()
    return [Window(Where(producer_id, kind, stream), 0, first) for first, stream in found]


def _rows(connection: Connection, window: Window, names: set[str] | None = None) -> Table:
    rows = read_at(connection, t.chunks, window, names)
    if rows is None:
        raise AssertionError("a chunk that a snapshot lists is in it")
    return rows
