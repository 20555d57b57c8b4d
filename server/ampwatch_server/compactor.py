"""The compactor: the one thread that turns what was acknowledged into rows, chunks, findings and summaries.

For each run that got something new, under the run's lease: events become rows, the diagnosis sees the batches and
its findings replace those before, tables are folded into chunks, and the summary is made anew. Every step can be
cut off and repeated: what was not finished still waits in the inbox.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.diagnosis.findings import Finding
from ampwatch.records import Batch

from . import tables as t
from .db import Database, text
from .describe import describe_run, insert_events
from .diagnoser import Diagnoser, Engine, Result, RunDiagnosis, note_failure, replace_findings
from .fold import fold
from .lease import Lease, LeaseLost, Leases
from .metrics import Metrics
from .nudges import Nudges
from .settings import Settings
from .store.blob import pack
from .store.tail import Key, TailReader, load, unfolded_batch, waiting, waiting_count
from .store.windows import MAX_ATTEMPT, WINDOW, floor_to
from .summary import summarise
from .writer import Unavailable

log = logging.getLogger(__name__)

SWEEP_S: Final = (
    5.0  # how often runs are looked for that nobody announced: of a dead server, or fallen silent
)
PAUSE_S: Final = 0.2  # between two passes: batches that arrive together are worked on together
REST: Final = (
    2.0  # × the CPU time of a pass, if that is longer: taking batches in comes before showing them …
)
MOST_REST_S: Final = 10.0  # … for so long
IDLE_S: Final = 60.0  # silence after which the last window of a producer is folded too
BATCHES: Final = 512  # of a run held in memory at once

_ROLL: Final = (
    t.producers.update()
    .where(t.producers.c.id == sa.bindparam("rolled_up"))
    .values(rolled=sa.bindparam("end", type_=sa.BigInteger))
)


class Compactor:
    """Works on runs as they are announced.

    Arguments:
        database, settings, tails.
        engine: makes a diagnosis.
        changed: called after each pass with the run, whose summary and findings may be new.
        found: called with the findings of a run in the transaction that stores them.
        metrics: counts what training jobs had to drop.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        tails: TailReader,
        engine: Callable[[], Engine],
        changed: Callable[[str], None],
        found: Callable[[Connection, str, list[Finding]], None],
        metrics: Metrics,
    ) -> None:
        self._database, self._settings, self._tails, self._changed = database, settings, tails, changed
        self._found, self._metrics = found, metrics
        self._diagnoser = Diagnoser(engine)
        self._holder = uuid.uuid4().hex
        self._leases = Leases(database, settings, self._holder)
        self._nudges = Nudges(database, self.look_at)
        self._told: set[str] = set()  # runs of which another server has something
        self._runs: dict[str, list[Key]] = {}  # announced, and what is new of them
        self._since: dict[str, float] = {}  # when each run's oldest news came that is not visible yet
        self._swept = time.monotonic()
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ampwatch-compactor", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._leases.start()
        self._nudges.start()
        self._thread.start()

    def announce(self, news: Mapping[str, Sequence[Key]]) -> None:
        """These batches of these runs are new. Never blocks on work."""
        with self._news:
            for run, keys in news.items():
                self._runs.setdefault(run, []).extend(keys)
                self._since.setdefault(run, time.monotonic())
            self._news.notify()

    def look_at(self, run: str) -> None:
        """Another server has stored something of a run. Runs that are not worked on here are left to others."""
        if self._leases.has(run):
            with self._news:
                self._told.add(run)
                self._news.notify()

    def lag_s(self) -> float:
        """How long the oldest news has waited to become visible, s."""
        with self._news:
            oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def stop(self) -> None:
        """Finish the pass under way, give the leases back and end."""
        self._stop.set()
        with self._news:
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()
            with suppress(Unavailable):  # they run out by themselves
                self._leases.stop()
            self._nudges.stop()

    def process(self, run: str, *, news: Sequence[Key] | None = None, idle: bool = False) -> None:
        """One pass over a run: everything that waits for it now.

        Arguments:
            news: where what is new is known, it alone is looked at, and not all that waits.
            idle: the run was found by the sweep: only silent producers are worked on, unless there is news.
        """
        lease = Lease(run, self._holder, self._settings)
        if not self._database.write(lease.renew):
            self._diagnoser.forget(run)  # another server had it, or it is another run of the same name
            if not self._database.write(lease.acquire):
                if news:
                    self._nudges.tell(run)
                return
        with self._leases.held(lease):
            self._pass(lease, news, idle=idle)

    def _pass(self, lease: Lease, news: Sequence[Key] | None, *, idle: bool) -> None:
        diagnosis, lowest = self._digest(lease, news)
        producers = self._unfinished(lease.run, lowest, silent_only=idle and not lowest)
        ends = self._fold_producers(lease, diagnosis, producers, lowest)
        if ends or lowest:
            counted = producers
            if not diagnosis.counts.has_begun:
                counted = list({row.id: row for row in (*self._everyone(lease.run), *producers)}.values())
            diagnosis.counts.write(self._database, self._tails, lease, counted)
            self._summarise(lease, ends)
            self._changed(lease.run)

    def _work(self) -> None:
        while not self._stop.is_set():
            announced, swept, began = self._next(), self._sweep(), time.thread_time()
            for run in sorted(announced.keys() | swept):
                if self._stop.is_set():
                    break
                news = None if run in swept else announced[run]
                self._guarded(run, news, idle=run not in announced)
            took = time.thread_time() - began
            self._stop.wait(max(PAUSE_S, min(REST * took, MOST_REST_S)))

    def _next(self) -> dict[str, list[Key]]:
        with self._news:
            if not (self._runs or self._told or self._stop.is_set()):
                self._news.wait(max(0.0, self._swept + SWEEP_S - time.monotonic()))
            runs, self._runs = self._runs, {}
            return runs

    def _sweep(self) -> set[str]:
        """Runs to look at: those that another server has told of; and once each `SWEEP_S`, however much is announced
        meanwhile, all in which something is to be done.
        """
        with self._news:
            told, self._told = self._told, set()
        now = time.monotonic()
        if now < self._swept + SWEEP_S:
            return told
        self._swept = now
        unfinished = sa.select(t.producers.c.run).where(t.producers.c.rolled < t.producers.c.end_attempt)
        try:
            with self._database.read() as connection:
                return told | set(connection.scalars(sa.select(t.inbox.c.run).union(unfinished)))
        except Unavailable as error:
            log.warning("%s", error)
            return told

    def _guarded(self, run: str, news: Sequence[Key] | None, *, idle: bool) -> None:
        try:
            self.process(run, news=news, idle=idle)
            self._shown(run)
        except LeaseLost as lost:
            log.info("%s", lost)
            self._diagnoser.forget(run)
        except Unavailable as error:
            log.warning("work on run %s is put off: %s", run, error)
            self._diagnoser.forget(run)
        except Exception:
            log.exception("work on run %s failed and will be tried again", run)
            self._diagnoser.forget(run)

    def _shown(self, run: str) -> None:
        with self._news:
            if run not in self._runs:  # nothing came meanwhile
                self._since.pop(run, None)

    def _digest(self, lease: Lease, news: Sequence[Key] | None) -> tuple[RunDiagnosis, dict[int, int]]:
        """Events and diagnosis of what the diagnosis has not seen; the lowest attempt of it of each producer."""
        with self._database.read() as connection:
            if not self._diagnoser.has(lease.run):
                news = None
            diagnosis = self._diagnoser.of(connection, lease.run)
            keys = waiting(connection, lease.run) if news is None else sorted(news)
        if news is None:
            diagnosis.given.intersection_update(keys)  # what has been folded will not come again
        new = [key for key in keys if key not in diagnosis.given]
        lowest: dict[int, int] = {}
        for start in range(0, len(new), BATCHES):
            with self._database.read() as connection:
                rows = load(connection, new[start : start + BATCHES])
            for row in rows:
                first = MAX_ATTEMPT if row.kind == "events" else row.first
                lowest[row.producer_id] = min(lowest.get(row.producer_id, MAX_ATTEMPT), first)
            batches = {(row.producer_id, row.seq): unfolded_batch(row) for row in rows}
            diagnosis.add(batches)
            self._record(lease, diagnosis, batches, last=start + BATCHES >= len(new))
        return diagnosis, lowest

    def _record(
        self, lease: Lease, diagnosis: RunDiagnosis, batches: dict[Key, Batch], *, last: bool
    ) -> None:
        """Store events; with the last of what is new also what all of it says. Until then that waits in the inbox."""
        events = {key: batch for key, batch in batches.items() if batch.kind == "events"}
        diagnosis.is_described &= not events
        result = diagnosis.result() if last else None

        def job(connection: Connection) -> None:
            lease.assert_held(connection)
            for (producer_id, seq), batch in events.items():
                insert_events(connection, producer_id, batch, self._settings.clock())
                mine = sa.and_(t.inbox.c.producer == producer_id, t.inbox.c.seq == seq)
                connection.execute(t.inbox.delete().where(mine))
            diagnosis.given.difference_update(events)
            if last:
                self._describe(connection, lease.run, diagnosis, result)

        self._database.write(job)
        self._count_dropped(events.values())

    def _describe(
        self, connection: Connection, run: str, diagnosis: RunDiagnosis, result: Result | None
    ) -> None:
        if not diagnosis.is_described:
            caught_up = waiting_count(connection, run) == len(diagnosis.given)
            diagnosis.is_described = not describe_run(connection, run, caught_up=caught_up)
        if result is None:
            note_failure(connection, run)
        else:
            replace_findings(connection, run, *result)
            self._found(connection, run, result[0])

    def _count_dropped(self, batches: Iterable[Batch]) -> None:
        told = (event.data for batch in batches for event in batch.events() if event.type == "dropped")
        for data in told:
            label = ("reason", text(data.get("reason"), 40))
            self._metrics.add("ampwatch_dropped_total", _number_of(data), label)

    def _unfinished(self, run: str, new: Collection[int], *, silent_only: bool) -> list[Row[Any]]:
        """The producers with something to fold, roll up or count: those with news, and those that are silent."""
        row = t.producers.c
        silence = self._settings.clock() - IDLE_S
        whole = sa.or_(row.finished, row.last_seen < silence).label("whole")
        columns = (row.id, row.attempts, row.end_attempt, row.rolled, whole)
        query = sa.select(*columns).where(
            row.run == run,
            sa.or_(sa.exists().where(t.inbox.c.producer == row.id), row.rolled < row.end_attempt),
            row.last_seen < silence if silent_only else sa.true(),
        )
        with self._database.read() as connection:
            found = connection.execute(query).all()
        return [p for p in found if p.whole or p.rolled < p.end_attempt or p.id in new]

    def _everyone(self, run: str) -> list[Row[Any]]:
        """All producers of which something was folded or counted: whoever had the run before may have been cut off
        between the two. Of the others everything still waits, and is counted as it comes.
        """
        columns: tuple[sa.ColumnElement[Any], ...] = (t.producers.c.id, t.producers.c.attempts)
        folded = sa.exists().where(t.chunks.c.producer == t.producers.c.id)
        query = sa.select(*columns).where(
            t.producers.c.run == run, sa.or_(t.producers.c.attempts > 0, folded)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).all())

    def _fold_producers(
        self, lease: Lease, diagnosis: RunDiagnosis, producers: Iterable[Row[Any]], lowest: Mapping[int, int]
    ) -> dict[int, int]:
        """Fold what the diagnosis was given, where a window may be complete; answer where each producer ends."""
        ends = {}
        for row in producers:
            ends[row.id] = row.end_attempt
            complete = floor_to(row.rolled, WINDOW)
            late = lowest.get(row.id, MAX_ATTEMPT) < complete
            if row.whole or late or floor_to(row.end_attempt, WINDOW) > complete:
                given = diagnosis.given
                ends[row.id] = fold(self._database, self._tails, lease, row.id, given, whole=row.whole)
        return ends

    def _summarise(self, lease: Lease, ends: dict[int, int]) -> None:
        with self._database.read() as connection:
            summary = summarise(connection, self._tails, lease.run)
        self._database.write(lambda connection: self._publish(connection, lease, summary, ends))

    def _publish(
        self, connection: Connection, lease: Lease, summary: dict[str, Any], ends: dict[int, int]
    ) -> None:
        """Show the summary. Only now the producers count as rolled up: what was cut off before is found again."""
        lease.assert_held(connection)
        if ends:
            connection.execute(_ROLL, [{"rolled_up": key, "end": end} for key, end in ends.items()])
        latest = connection.execute(sa.select(sa.func.max(t.run_state.c.changed))).scalar_one()
        values: dict[Any, Any] = {
            "summary": pack(summary),
            "attempt_s": summary.get("attempt_s", 0.0),
            "revision": t.run_state.c.revision + 1,
            "changed": max(latest, self._settings.clock()),  # a clock that was set back hides no news
        }
        connection.execute(t.run_state.update().where(t.run_state.c.run == lease.run).values(values))


def _number_of(dropped: Mapping[str, Any]) -> int:
    """How many were dropped. Of the numbers between first and last not all need be of this kind."""
    first, last = (_whole(dropped.get(name)) for name in ("first_seq", "last_seq"))
    known = [n for name in ("count", "batches") if (n := _whole(dropped.get(name))) > 0]
    return known[0] if known else last - first + 1 if 0 <= first <= last else 1


def _whole(value: Any) -> int:
    """A count that a training job sent; -1 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
