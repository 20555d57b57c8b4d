"""Ingest: a checked batch goes into the inbox, durably, once.

Batches that arrive while a commit is under way wait for each other and share the next one. (producer, seq) is
stored once however often it is sent; the same key with another digest is a conflict.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.errors import AmpwatchError
from ampwatch.records import Batch

from . import tables as t
from .agenda import New
from .db import Database, Prepared, upsert
from .limits import Extent
from .settings import Settings

_KEYS_A_QUERY: Final = 400  # below the bound on variables of old SQLite
_EMPTY_MAP: Final = b"\x80"  # of msgpack


class Conflict(AmpwatchError):
    """A batch that contradicts what is stored: another body under its key, or its producer in another run."""


class OtherProject(AmpwatchError):
    """A batch that came by a token of one project, for a run of another."""


class Overloaded(AmpwatchError):
    """More waits for the disk than the server wants to hold in memory; the same batch may be sent again later."""


class Stored(NamedTuple):
    """What became of a batch.

    Arguments:
        new: False where it was stored before.
        last_seq: the highest number that was stored of its producer before, -1 where there was none: who has been told
            of a higher one knows that the database was put back. None where it says nothing, as the run was deleted.
    """

    new: bool
    last_seq: int | None = None


Outcome = Stored | Conflict | OtherProject
Told = Callable[[Sequence[Stored | BaseException]], object]


class _Waiting(NamedTuple):
    batch: Batch
    extent: Extent
    time: float
    received: float
    project: str | None  # of the token that it came by


class _Request(NamedTuple):
    """What was handed over together, and who is told of it."""

    batches: list[_Waiting]
    told: Told


class _Producer(NamedTuple):
    id: int
    run: str
    rank: int
    last_seq: int  # the highest that is stored
    is_of_deleted: bool = False  # its run was deleted, perhaps while it sent


class _Outcomes(NamedTuple):
    """What became of each batch of a group, and where the new ones of each run lie."""

    of_each: list[Outcome]
    new: dict[str, list[New]]


class Inbox:
    """Appends batches to the inbox.

    Arguments:
        database, settings.
        committed: called in the writing thread after each commit with what is new of each run.
    """

    def __init__(
        self, database: Database, settings: Settings, committed: Callable[[dict[str, list[New]]], None]
    ) -> None:
        self._database, self._settings, self._committed = database, settings, committed
        self._lock = threading.Lock()
        self._waiting: list[_Request] = []
        self._waiting_bytes = 0

    def append(
        self, batch: Batch, extent: Extent, *, time: float | None = None, project: str | None = None
    ) -> Future[Stored]:
        """Store a batch whose body was checked. The future resolves after the durable commit.

        Arguments:
            extent: `limits.check(batch)`.
            time: when it was produced, where that is known to be long ago; now if None.
            project: that its run must belong to, and will where it is new; any if None.
        Errors: in the future, Conflict or OtherProject. Raised at once, Overloaded.
        """
        future: Future[Stored] = Future()
        self.append_all([(batch, extent)], partial(_settle, future), time=time, project=project)
        return future

    def append_all(
        self,
        given: Sequence[tuple[Batch, Extent]],
        told: Told,
        *,
        time: float | None = None,
        project: str | None = None,
        begin: Callable[[Callable[[], None]], object] = lambda commit: commit(),
    ) -> None:
        """Store several in one commit, each as `append` does.

        Arguments:
            told: called after the commit, in the writing thread, with what became of each: Stored, or an error.
            begin: calls what it is given, which begins the commit, now or soon; who comes until then shares it.
        Errors: Overloaded where not all of them find room.
        """
        now = self._settings.clock()
        moment = now if time is None else time
        new = [_Waiting(batch, extent, moment, now, project) for batch, extent in given]
        size_bytes = sum(len(batch.body) for batch, _ in given)
        with self._lock:
            if self._waiting_bytes + size_bytes > self._settings.max_pending_bytes:
                raise Overloaded("too many batches wait for the database; send this one again later")
            is_first = not self._waiting
            self._waiting.append(_Request(new, told))
            self._waiting_bytes += size_bytes
        if is_first:  # those who come until the writer gets to it share this commit
            begin(self._commit)

    def _commit(self) -> None:
        group: list[_Request] = []

        def job(connection: Connection) -> _Outcomes:
            group.extend(self._take())
            return _store(connection, [waiting for request in group for waiting in request.batches])

        def done(future: Future[_Outcomes]) -> None:
            if (error := future.exception()) is not None:
                for request in group or self._take():
                    request.told([error] * len(request.batches))
                return
            outcomes, new = future.result()
            left = iter(outcomes)
            for request in group:
                request.told(list(islice(left, len(request.batches))))
            if new:
                self._committed(new)

        self._database.submit(job).add_done_callback(done)

    def _take(self) -> list[_Request]:
        with self._lock:
            taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return taken


def _settle(future: Future[Stored], outcomes: Sequence[Stored | BaseException]) -> None:
    """Resolve the future of a batch, unless whoever waited for it has left: it is stored all the same."""
    (outcome,) = outcomes
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Stored):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _store(connection: Connection, group: list[_Waiting]) -> _Outcomes:
    producers = _producers(connection, group)
    begun = [w for w in group if w.batch.producer not in producers]
    _insert_runs(connection, begun)
    owners = _owners(connection, group)
    admitted = [w for w in group if _may_send(w, owners)]
    producers |= _register(connection, [w for w in begun if _may_send(w, owners)])
    digests = _digests(connection, admitted, producers)
    outcomes: list[Outcome] = []
    new: list[tuple[_Producer, _Waiting]] = []
    for waiting in group:
        if not _may_send(waiting, owners):
            told = (
                f"run {waiting.batch.run} is not one of project {waiting.project!r}, which this token is for"
            )
            outcomes.append(OtherProject(told))
            continue
        producer = producers[waiting.batch.producer]
        outcome = _judge(producer, waiting.batch, digests)
        outcomes.append(outcome)
        if isinstance(outcome, Stored) and outcome.new:
            digests[producer.id, waiting.batch.seq] = bytes.fromhex(waiting.batch.digest)
            new.append((producer, waiting))
            last_seq = max(producer.last_seq, waiting.batch.seq)
            producers[waiting.batch.producer] = producer._replace(last_seq=last_seq)
    if new:
        _insert(connection, new)
        _advance(connection, new)
    news: dict[str, list[New]] = {}
    for producer, waiting in new:
        batch = waiting.batch
        what = New((producer.id, batch.seq), len(batch.body), waiting.extent.is_urgent)
        news.setdefault(producer.run, []).append(what)
    return _Outcomes(outcomes, news)


def _may_send(waiting: _Waiting, owners: Mapping[str, str]) -> bool:
    return waiting.project in (None, owners.get(waiting.batch.run))


def _judge(producer: _Producer, batch: Batch, digests: dict[tuple[int, int], bytes]) -> Stored | Conflict:
    if (producer.run, producer.rank) != (batch.run, batch.rank):
        return Conflict(
            f"producer {batch.producer} is rank {producer.rank} of run {producer.run}, "
            f"not rank {batch.rank} of run {batch.run}"
        )
    known = digests.get((producer.id, batch.seq))
    last_seq = None if producer.is_of_deleted else producer.last_seq
    if known is None:
        return Stored(new=True, last_seq=last_seq)
    if known != bytes.fromhex(batch.digest):
        return Conflict(
            f"producer {batch.producer} has sent another batch with seq {batch.seq} "
            f"(digest {known.hex()}, this one has {batch.digest})"
        )
    return Stored(new=False, last_seq=last_seq)


def _owners(connection: Connection, group: list[_Waiting]) -> dict[str, str]:
    """The projects of the runs of a group, as they are stored; not asked for where no token has one.

    Of a run that two servers insert at once it is known only now whose it has become.
    """
    if all(w.project is None for w in group):
        return {}
    owners: dict[str, str] = {}
    for some in _slices(sorted({w.batch.run for w in group})):
        query = sa.select(t.runs.c.run, t.runs.c.project).where(t.runs.c.run.in_(some))
        owners |= {row.run: row.project for row in connection.execute(query)}
    return owners


def _register(connection: Connection, begun: list[_Waiting]) -> dict[str, _Producer]:
    """Rows of producers, made where another server has not, and locked until the commit."""
    first = {w.batch.producer: w for w in reversed(begun)}
    if not first:
        return {}
    rows = [_new_producer(w) for _, w in sorted(first.items())]
    connection.execute(upsert(connection, t.producers).on_conflict_do_nothing(), rows)
    deleted = _deleted(connection, {w.batch.run for w in begun})
    found = _producers(connection, begun)
    return {name: p._replace(is_of_deleted=p.run in deleted) for name, p in found.items()}


def _deleted(connection: Connection, runs: set[str]) -> set[str]:
    """Which of these runs somebody has deleted at some time."""
    audit = t.audit.c
    query = sa.select(audit.subject).where(audit.action == "delete")
    return {
        run
        for some in _slices(sorted(runs))
        for run in connection.scalars(query.where(audit.subject.in_(some)))
    }


def _producers(connection: Connection, group: list[_Waiting]) -> dict[str, _Producer]:
    found: dict[str, _Producer] = {}
    for names in _slices(sorted({w.batch.producer for w in group})):
        for name, *producer in connection.execute(_FIND, {"names": names}):
            found[name] = _Producer(*producer)
    return found


def _new_producer(waiting: _Waiting) -> dict[str, Any]:
    batch = waiting.batch
    counts = dict.fromkeys(("received", "end_attempt", "rolled", "attempts", "skipped", "announced"), 0)
    seen = {"first_seen": waiting.time, "last_seen": waiting.time}
    header = {"producer": batch.producer, "run": batch.run, "rank": batch.rank}
    return header | counts | seen | {"last_seq": -1, "finished": False, "host": "", "device": ""}


def _insert_runs(connection: Connection, begun: list[_Waiting]) -> None:
    """Rows of the runs that are new, each for the project of who sends first."""
    first = sorted({w.batch.run: w for w in reversed(begun)}.items())
    if not first:
        return
    runs = [_new_run(run, w.time, w.project or "") for run, w in first]
    connection.execute(upsert(connection, t.runs).on_conflict_do_nothing(), runs)
    states = [
        {
            "run": run,
            "holder": "",
            "lease_until": 0.0,
            "revision": 0,
            "changed": w.time,
            "summary": _EMPTY_MAP,
            "verdict": _EMPTY_MAP,
        }
        for run, w in first
    ]
    connection.execute(upsert(connection, t.run_state).on_conflict_do_nothing(), states)


def _new_run(run: str, time: float, project: str) -> dict[str, Any]:
    moments = dict.fromkeys(("started", "last_seen", "last_attempt"), time)
    texts = {"project": project, "given_name": "", "notes": ""}
    return (
        {
            "run": run,
            "bound": bool(project),
            "given_tags": "[]",
            "archived": False,
            "ended": False,
            "complete": False,
        }
        | moments
        | texts
    )


def _digests(
    connection: Connection, group: list[_Waiting], producers: dict[str, _Producer]
) -> dict[tuple[int, int], bytes]:
    """Digests of what is stored of the group. What has a number beyond all that are stored need not be looked for."""
    found: dict[tuple[int, int], bytes] = {}
    given = ((producers[w.batch.producer], w.batch.seq) for w in group)
    keys = {(producer.id, seq) for producer, seq in given if seq <= producer.last_seq}
    for some in _slices(sorted(keys)):
        query = sa.select(t.receipts).where(sa.tuple_(t.receipts.c.producer, t.receipts.c.seq).in_(some))
        found |= {(row.producer, row.seq): row.digest for row in connection.execute(query)}
    return found


def _insert(connection: Connection, new: list[tuple[_Producer, _Waiting]]) -> None:
    receipts, bodies = [], []
    for producer, waiting in new:
        batch, extent = waiting.batch, waiting.extent
        key = {"producer": producer.id, "seq": batch.seq}
        receipts.append(key | {"digest": bytes.fromhex(batch.digest)})
        header = {"run": batch.run, "kind": batch.kind, "digest": batch.digest, "body": batch.body}
        bodies.append(key | header | {"first": extent.first, "last": extent.last, "folded": 0})
    _INSERT_RECEIPT.execute(connection, receipts)
    _INSERT.execute(connection, bodies)


def _advance(connection: Connection, new: list[tuple[_Producer, _Waiting]]) -> None:
    """Move the high-water marks of producers and runs."""
    by_producer: dict[int, list[_Waiting]] = {}
    by_run: dict[str, list[_Waiting]] = {}
    for producer, waiting in new:
        by_producer.setdefault(producer.id, []).append(waiting)
        by_run.setdefault(producer.run, []).append(waiting)
    moves = [
        {
            "moved": producer_id,
            "more": len(given),
            "seq": max(w.batch.seq for w in given),
            "end": max(w.extent.last for w in given) + 1,
            "time": max(w.time for w in given),
        }
        for producer_id, given in sorted(by_producer.items())
    ]
    _MOVE.execute(connection, moves)
    runs = [
        {
            "moved": run,
            "time": max(w.time for w in given),
            "came": max(w.received for w in given),
            "attempts": max((w.time for w in given if w.batch.kind == "attempts"), default=0.0),
        }
        for run, given in sorted(by_run.items())
    ]
    _MOVE_RUN.execute(connection, runs)


def _greatest(column: sa.ColumnElement[Any], value: Any) -> sa.ColumnElement[Any]:
    """The larger of two; SQLite and PostgreSQL have no function for it in common."""
    return sa.case((column < value, value), else_=column)


def _at_least(column: sa.Column[Any], name: str) -> sa.ColumnElement[Any]:
    return _greatest(column, sa.bindparam(name, type_=column.type))


_INSERT_RECEIPT: Final = Prepared(t.receipts.insert())
_INSERT: Final = Prepared(t.inbox.insert())
_MOVE: Final = Prepared(
    t.producers.update()
    .where(t.producers.c.id == sa.bindparam("moved"))
    .values(
        received=t.producers.c.received + sa.bindparam("more", type_=sa.BigInteger),
        last_seq=_at_least(t.producers.c.last_seq, "seq"),
        end_attempt=_at_least(t.producers.c.end_attempt, "end"),
        last_seen=_at_least(t.producers.c.last_seen, "time"),
    )
)
_MOVE_RUN: Final = Prepared(
    t.runs.update()
    .where(t.runs.c.run == sa.bindparam("moved"))
    .values(
        last_seen=_at_least(t.runs.c.last_seen, "time"),
        last_attempt=_at_least(t.runs.c.last_attempt, "attempts"),
        received=sa.bindparam("came", type_=sa.Float),
    )
)
_FIND: Final = (
    sa.select(*(t.producers.c[name] for name in ("producer", "id", "run", "rank", "last_seq")))
    .where(t.producers.c.producer.in_(sa.bindparam("names", expanding=True)))
    .order_by(t.producers.c.id)
    .with_for_update()
)


def _slices(items: list[Any]) -> Iterable[list[Any]]:
    return (items[i : i + _KEYS_A_QUERY] for i in range(0, len(items), _KEYS_A_QUERY))
