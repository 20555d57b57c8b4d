"""Diagnosis on the server: one engine for each run that grows, kept as a cache that the store can rebuild."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch import records
from ampwatch.diagnosis.findings import Finding, Verdict
from ampwatch.records import Batch, Event

from . import tables as t
from .counts import Counts
from .store import codec
from .store.blob import pack
from .store.rows import as_sent
from .store.tail import Key

log = logging.getLogger(__name__)

_KEPT_RUNS: Final = 64
_REBUILT_SEQ: Final = 2**62  # batches made of chunks are numbered from here: no sender comes this far
_EVENTS_A_BATCH: Final = 1000
_TABLES: Final[tuple[Literal["attempts", "tensors"], ...]] = ("attempts", "tensors")

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


class RunDiagnosis:
    """The engine of one run, which of the waiting batches it has been given, and how far they are counted."""

    def __init__(self, engine: Engine, stored: Iterable[Batch]) -> None:
        self.given: set[Key] = set()
        self.counts = Counts()
        self.is_described = False  # what the run says of itself, or whether it is complete, may have changed
        self._engine: Engine | None = engine
        for batch in stored:
            self._add(batch)

    def add(self, batches: dict[Key, Batch]) -> None:
        """Give the engine what it has not seen."""
        for key, batch in batches.items():
            if key not in self.given:
                self.given.add(key)
                self.counts.note(key[0], batch)
                self._add(batch)

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
            self._engine.add(batch)
        except Exception:  # noqa: BLE001 - as above
            self._give_up()

    def _give_up(self) -> None:
        log.exception(
            "the diagnosis of a run failed; the server goes on without it until it is started again"
        )
        self._engine = None


class Diagnoser:
    """The diagnoses of the runs that this server holds a lease on, the 64 that grew last."""

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self._engine = engine
        self._runs: OrderedDict[str, RunDiagnosis] = OrderedDict()

    def has(self, run: str) -> bool:
        """Whether a run need not be rebuilt."""
        return run in self._runs

    def of(self, connection: Connection, run: str) -> RunDiagnosis:
        """The diagnosis of a run, rebuilt from the store where this server has none."""
        if run not in self._runs:
            self._runs[run] = RunDiagnosis(self._engine(), stored_batches(connection, run))
        self._runs.move_to_end(run)
        while len(self._runs) > _KEPT_RUNS:
            self._runs.popitem(last=False)
        return self._runs[run]

    def forget(self, run: str) -> None:
        """Drop a run: another server diagnoses it now, or it was deleted."""
        self._runs.pop(run, None)


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
    """All of a run that lies in rows and chunks, as batches; what waits in the inbox is not among them."""
    query = sa.select(t.producers.c.id, t.producers.c.producer, t.producers.c.rank).where(
        t.producers.c.run == run
    )
    for producer_id, producer, rank in connection.execute(query.order_by(t.producers.c.id)).all():
        numbers = itertools.count(_REBUILT_SEQ)
        header = {"producer": producer, "run": run, "rank": rank}
        for events in _stored_events(connection, producer_id):
            yield records.pack_events(events, seq=next(numbers), **header)
        for kind in _TABLES:
            for data in _level_zero(connection, producer_id, kind):
                for table in as_sent(kind, codec.decode(data)):
                    yield records.pack_table(kind, table, seq=next(numbers), **header)


def _stored_events(connection: Connection, producer_id: int) -> Iterator[list[Event]]:
    query = sa.select(t.events.c.body).where(t.events.c.producer == producer_id)
    decoder = msgspec.msgpack.Decoder(Event)
    for part in connection.scalars(query.order_by(t.events.c.seq, t.events.c.place)).partitions(
        _EVENTS_A_BATCH
    ):
        yield [decoder.decode(body) for body in part]


def _level_zero(connection: Connection, producer_id: int, kind: str) -> Iterator[bytes]:
    mine = sa.and_(t.chunks.c.producer == producer_id, t.chunks.c.kind == kind, t.chunks.c.level == 0)
    order = (t.chunks.c.first, t.chunks.c.stream)
    for first, stream in connection.execute(sa.select(*order).where(mine).order_by(*order)).all():
        one = sa.and_(mine, t.chunks.c.first == first, t.chunks.c.stream == stream)
        yield connection.execute(sa.select(t.chunks.c.data).where(one)).scalar_one()
