"""The compactor: the one thread that turns what was acknowledged into rows, chunks, findings and summaries.

In looks at some of what is new of a run (agenda.py), under the run's lease: events become rows, the diagnosis sees the
batches and its findings replace those before, tables are folded into chunks, and the summary is made anew. Through a
backlog findings and summary are made once a second, since both are about all of the run. Every step can be cut off and
repeated: what was not finished still waits in the inbox, and a run that was read but not judged is marked as such.
"""

from __future__ import annotations

import logging
import math
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
from .agenda import Agenda, Look, New, part
from .db import Database, text
from .describe import describe_run, insert_events
from .diagnoser import Diagnoser, Engine, Result, RunDiagnosis, note_failure, replace_findings
from .fold import fold
from .lease import Lease, LeaseLost, Leases
from .metrics import Labels
from .nudges import Nudges
from .outdated import Outdated, as_judged, is_outdated, mark_unjudged, still_judged
from .settings import Settings
from .store.blob import pack
from .store.tail import Key, TailReader, load, unfolded_batch, waiting, waiting_count
from .store.windows import MAX_ATTEMPT, WINDOW, floor_to
from .summary import summarise
from .writer import Unavailable

log = logging.getLogger(__name__)

SWEEP_S: Final = 5.0
IDLE_S: Final = 60.0  # silence after which the last window of a producer is folded too
TOLD_S: Final = 1.0  # while more of a run waits to be read, it is judged and summed up so often

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
        count: adds to a counter, as `Metrics.add`: what training jobs had to drop.
        sweep_s: how often runs are looked for that nobody announced: of a dead server, or fallen silent.
        told_s: how often a run is judged and summed up while more of it waits to be read.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        tails: TailReader,
        engine: Callable[[], Engine],
        changed: Callable[[str], None],
        found: Callable[[Connection, str, list[Finding]], None],
        count: Callable[[str, float, Labels], None],
        sweep_s: float = SWEEP_S,
        told_s: float = TOLD_S,
    ) -> None:
        self._database, self._settings, self._tails, self._changed = database, settings, tails, changed
        self._found, self._count = found, count
        self._diagnoser = Diagnoser(engine)
        self._holder = uuid.uuid4().hex
        self._leases = Leases(database, settings, self._holder)
        self._nudges = Nudges(database, self.look_at)
        self._agenda, self._outdated = Agenda(), Outdated()
        self._sweep_s, self._swept, self._told_s = sweep_s, -math.inf, told_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ampwatch-compactor", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._leases.start()
        self._nudges.start()
        self._thread.start()

    def announce(self, news: Mapping[str, Sequence[New]]) -> None:
        """These batches of these runs are new. Never blocks on work."""
        self._agenda.add(news)

    def look_at(self, run: str) -> None:
        """Another server has stored something of a run. Runs that are not worked on here are left to others."""
        if self._leases.has(run):
            self._agenda.look_at_all([run])

    def lag_s(self) -> float:
        """How long the oldest news has waited to become visible, s."""
        return self._agenda.lag_s()

    def stop(self) -> None:
        """Finish the pass under way, give the leases back and end."""
        self._stop.set()
        self._agenda.close()
        if self._thread.is_alive():
            self._thread.join()
            with suppress(Unavailable):  # they run out by themselves
                self._leases.stop()
            self._nudges.stop()

    def process(self, run: str) -> None:
        """All that waits for a run now, in one look after the other."""
        agenda = Agenda(lambda: math.inf)  # never rests
        agenda.look_at_all([run])
        while (look := agenda.take()) is not None:
            agenda.add({run: self._look_at(look)})

    def _work(self) -> None:
        while not self._stop.is_set():
            self._agenda.wait(max(0.0, self._swept + self._sweep_s - time.monotonic()))
            self._sweep()
            if (look := self._agenda.take()) is not None:
                began = time.thread_time()
                self._guarded(look)
                self._agenda.done(time.thread_time() - began)

    def _guarded(self, look: Look) -> None:
        try:
            self._agenda.add({look.run: self._look_at(look)})
            return
        except LeaseLost as lost:
            log.info("%s", lost)
        except Unavailable as error:
            log.warning("work on run %s is put off: %s", look.run, error)
        except Exception:
            log.exception("work on run %s failed and will be tried again", look.run)
        self._diagnoser.forget(look.run)

    def _sweep(self) -> None:
        """Once each `sweep_s`, however much is announced meanwhile, find all runs in which something is to be done, and
        one that an older engine has judged.
        """
        if time.monotonic() < self._swept + self._sweep_s:
            return
        self._swept = time.monotonic()
        unfinished = sa.select(t.producers.c.run).where(t.producers.c.rolled < t.producers.c.end_attempt)
        try:
            with self._database.read() as connection:
                found = connection.scalars(sa.select(t.inbox.c.run).union(unfinished)).all()
                outdated = self._outdated.next(connection)
        except Unavailable as error:
            log.warning("%s", error)
        else:
            self._agenda.look_at_all([*found, *outdated])

    def _look_at(self, look: Look) -> list[New]:
        """One look at a run; answers what else was found to be new of it, for looks to come."""
        lease = Lease(look.run, self._holder, self._settings)
        if not self._database.write(lease.renew):
            self._diagnoser.forget(look.run)  # another server had it, or it is another run of the same name
            if not self._database.write(lease.acquire):
                if look.news:
                    self._nudges.tell(look.run)
                return []
        with self._leases.held(lease):
            return self._look(lease, look)

    def _look(self, lease: Lease, look: Look) -> list[New]:
        with self._database.read() as connection:
            at_all = look.at_all or not self._diagnoser.has(lease.run)
            diagnosis = self._diagnoser.of(connection, lease.run)
            found = waiting(connection, lease.run) if at_all else {}
            outdated = at_all and is_outdated(connection, lease.run)
        if at_all:
            for key in diagnosis.given.keys() - found.keys():  # what has been folded will not come again
                del diagnosis.given[key]
        told = {new.key: new for new in look.news}
        news = [*told.values(), *(New(key, size) for key, size in found.items() if key not in told)]
        some, more = part([new for new in news if new.key not in diagnosis.given])
        rows, lowest = self._read([new.key for new in some])
        batches = {key: unfolded_batch(row) for key, row in rows.items()}
        diagnosis.add(batches)
        diagnosis.is_unjudged |= bool(batches) or outdated
        tells = not (more or look.is_followed) or time.monotonic() >= diagnosis.told_at + self._told_s
        is_judged = tells and diagnosis.is_unjudged
        if batches or is_judged:
            self._record(lease, diagnosis, batches, is_judged=is_judged)
        producers = self._unfinished(lease.run, lowest, silent_too=at_all)
        ends = self._fold_producers(lease, diagnosis, producers, lowest, rows)
        diagnosis.uncounted |= {row.id: row for row in producers}
        if tells and (diagnosis.uncounted or is_judged):
            self._tell(lease, diagnosis, ends, is_judged=is_judged)
        elif ends:
            self._database.write(lambda connection: _roll_on(connection, lease, ends))
        return more

    def _read(self, keys: list[Key]) -> tuple[dict[Key, Row[Any]], dict[int, int]]:
        """These batches as they wait, and the lowest attempt of each producer."""
        if not keys:
            return {}, {}
        with self._database.read() as connection:
            rows = load(connection, keys)
        lowest: dict[int, int] = {}
        for row in rows:
            first = MAX_ATTEMPT if row.kind == "events" else row.first
            lowest[row.producer_id] = min(lowest.get(row.producer_id, MAX_ATTEMPT), first)
        return {(row.producer_id, row.seq): row for row in rows}, lowest

    def _record(
        self, lease: Lease, diagnosis: RunDiagnosis, batches: dict[Key, Batch], *, is_judged: bool
    ) -> None:
        """Store events, and what is known now; where it is not judged now, that it has to be."""
        events = {key: batch for key, batch in batches.items() if batch.kind == "events"}
        diagnosis.is_described &= not events
        result = diagnosis.result() if is_judged else None

        def job(connection: Connection) -> None:
            lease.assert_held(connection)
            for (producer_id, seq), batch in events.items():
                insert_events(connection, producer_id, batch, self._settings.clock())
                mine = sa.and_(t.inbox.c.producer == producer_id, t.inbox.c.seq == seq)
                connection.execute(t.inbox.delete().where(mine))
            for key in events:
                diagnosis.given.pop(key, None)
            self._describe(connection, lease.run, diagnosis)
            if is_judged:
                self._judge(connection, lease.run, result)
            else:
                mark_unjudged(connection, lease.run)

        self._database.write(job)
        self._count_dropped(events.values())

    def _describe(self, connection: Connection, run: str, diagnosis: RunDiagnosis) -> None:
        if not diagnosis.is_described:
            caught_up = waiting_count(connection, run) == len(diagnosis.given)
            diagnosis.is_described = not describe_run(connection, run, caught_up=caught_up)

    def _judge(self, connection: Connection, run: str, result: Result | None) -> None:
        if result is None:
            note_failure(connection, run)
        else:
            replace_findings(connection, run, *result)
            self._found(connection, run, result[0])

    def _count_dropped(self, batches: Iterable[Batch]) -> None:
        told = (event.data for batch in batches for event in batch.events() if event.type == "dropped")
        for data in told:
            label = ("reason", text(data.get("reason"), 40))
            self._count("ampwatch_dropped_total", _number_of(data), label)

    def _unfinished(self, run: str, new: Collection[int], *, silent_too: bool) -> list[Row[Any]]:
        """The producers with something to fold, roll up or count: those with news, and those that are silent."""
        row = t.producers.c
        silent = row.last_seen < self._settings.clock() - IDLE_S
        whole = sa.or_(row.finished, silent).label("whole")
        oldest = (row.attempts_from, row.tensors_from)
        columns = (row.id, row.attempts, row.end_attempt, row.rolled, *oldest, whole)
        waits = sa.or_(sa.exists().where(t.inbox.c.producer == row.id), row.rolled < row.end_attempt)
        which = sa.or_(row.id.in_(new), sa.and_(silent, waits) if silent_too else sa.false())
        with self._database.read() as connection:
            return list(connection.execute(sa.select(*columns).where(row.run == run, which)).all())

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
        self,
        lease: Lease,
        diagnosis: RunDiagnosis,
        producers: Sequence[Row[Any]],
        lowest: Mapping[int, int],
        read: dict[Key, Row[Any]],
    ) -> dict[int, int]:
        """Fold what the diagnosis was given, where a window may be complete; answer up to where each is rolled up."""

        def is_due(row: Row[Any]) -> bool:
            complete = floor_to(row.rolled, WINDOW)
            is_late = lowest.get(row.id, MAX_ATTEMPT) < complete
            return bool(row.whole) or is_late or floor_to(row.end_attempt, WINDOW) > complete

        due = [row for row in producers if is_due(row)]
        ends: dict[int, int] = {row.id: row.end_attempt for row in producers}
        return ends | fold(self._database, self._tails, lease, due, diagnosis.given, read)

    def _tell(self, lease: Lease, diagnosis: RunDiagnosis, ends: dict[int, int], *, is_judged: bool) -> None:
        """Count what is not counted yet, sum the run up, and let readers know."""
        counted = diagnosis.uncounted
        if not diagnosis.counts.has_begun:
            counted = {row.id: row for row in self._everyone(lease.run)} | counted
        diagnosis.counts.write(self._database, self._tails, lease, list(counted.values()))
        self._summarise(lease, diagnosis, ends, is_judged=is_judged)
        diagnosis.has_been_told(time.monotonic())
        self._changed(lease.run)

    def _summarise(
        self, lease: Lease, diagnosis: RunDiagnosis, ends: dict[int, int], *, is_judged: bool
    ) -> None:
        with self._database.read() as connection:
            summary = summarise(connection, self._tails, lease.run, diagnosis.given)
        judged = as_judged() if is_judged else still_judged()
        self._database.write(lambda connection: self._publish(connection, lease, summary, ends, judged))

    def _publish(
        self,
        connection: Connection,
        lease: Lease,
        summary: dict[str, Any],
        ends: dict[int, int],
        judged: dict[Any, Any],
    ) -> None:
        """Show the summary. Only now the producers count as rolled up: what was cut off before is found again."""
        _roll_on(connection, lease, ends)
        latest = connection.execute(sa.select(sa.func.max(t.run_state.c.changed))).scalar_one()
        values: dict[Any, Any] = judged | {
            "summary": pack(summary),
            "attempt_s": summary.get("attempt_s", 0.0),
            "revision": t.run_state.c.revision + 1,
            "changed": max(latest, self._settings.clock()),  # a clock that was set back hides no news
        }
        connection.execute(t.run_state.update().where(t.run_state.c.run == lease.run).values(values))


def _roll_on(connection: Connection, lease: Lease, ends: Mapping[int, int]) -> None:
    """These producers are folded and rolled up to these attempts. LeaseLost."""
    lease.assert_held(connection)
    if ends:
        connection.execute(_ROLL, [{"rolled_up": key, "end": end} for key, end in ends.items()])


def _number_of(dropped: Mapping[str, Any]) -> int:
    """How many were dropped. Of the numbers between first and last not all need be of this kind."""
    first, last = (_whole(dropped.get(name)) for name in ("first_seq", "last_seq"))
    known = [n for name in ("count", "batches") if (n := _whole(dropped.get(name))) > 0]
    return known[0] if known else last - first + 1 if 0 <= first <= last else 1


def _whole(value: Any) -> int:
    """A count that a training job sent; -1 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
