"""Counts of attempts, kept by what is new: what goes on where its producer stood is added, all else counted anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.records import Batch

from . import tables as t
from .db import Database
from .lease import Lease
from .store.tail import TailReader
from .summary import count_attempts

_ADD: Final = (
    t.producers.update()
    .where(t.producers.c.id == sa.bindparam("counted"))
    .values(
        attempts=t.producers.c.attempts + sa.bindparam("more", type_=sa.BigInteger),
        skipped=t.producers.c.skipped + sa.bindparam("skips", type_=sa.BigInteger),
    )
)


class Stretch(NamedTuple):
    """Attempts first <= attempt < end, each recorded once, how many of them were skipped, and the batch's number."""

    first: int
    end: int
    skipped: int
    seq: int


class _Counted(NamedTuple):
    """Where the attempts of a producer end that are counted, the count that was written, and the batches in it.

    A batch that came while it was counted anew may be in that count before it is noted: all up to `last_seq` are.
    """

    end: int
    attempts: int
    last_seq: int = -1


_NOTHING: Final = _Counted(0, 0)
_NOWHERE: Final = -1  # goes on from no attempt


class Counts:
    """Up to which attempt the producers of one run are counted, and what came since.

    What another server, or one that was cut off, has left is counted anew: at the first `write`, and wherever a row
    does not hold the count that was written last.
    """

    def __init__(self) -> None:
        self._upto: dict[int, _Counted] = {}
        self._new: dict[int, list[Stretch]] = {}
        self.has_begun = False  # until then every producer of the run is to be counted

    def note(self, producer_id: int, batch: Batch) -> None:
        """A batch that waits to be counted."""
        if batch.kind == "attempts":
            self._new.setdefault(producer_id, []).append(_stretch(batch))

    def write(
        self, database: Database, tails: TailReader, lease: Lease, producers: Sequence[Row[Any]]
    ) -> None:
        """Count what is new of these rows of `producers`. LeaseLost."""
        added = {row.id: joined for row in producers if (joined := self._going_on(row))}
        anew = [
            row.id for row in producers if row.id not in added and (row.id in self._new or not self.has_begun)
        ]
        counted = {key: _count_anew(database, tails, key) for key in anew}

        def job(connection: Connection) -> None:
            lease.assert_held(connection)
            for key, (_, values) in counted.items():
                connection.execute(t.producers.update().where(t.producers.c.id == key).values(values))
            if added:
                connection.execute(_ADD, [_addition(key, stretch) for key, stretch in added.items()])

        database.write(job)
        stood = {row.id: row.attempts for row in producers}
        self._upto |= {
            key: _Counted(stretch.end, stood[key] + stretch.end - stretch.first, stretch.seq)
            for key, stretch in added.items()
        }
        self._upto |= {key: now for key, (now, _) in counted.items()}
        self._new, self.has_begun = {}, True

    def _going_on(self, row: Row[Any]) -> Stretch | None:
        """What came of a producer, where it goes on without a gap from what is counted of it; else None."""
        known = self._upto.get(row.id, _NOTHING)
        noted = self._new.get(row.id)
        if not noted or known.attempts != row.attempts:  # another server has counted since
            return None
        new = sorted(stretch for stretch in noted if stretch.seq > known.last_seq)
        end = known.end
        for stretch in new:
            if stretch.first != end:
                return None
            end = stretch.end
        return Stretch(known.end, end, sum(stretch.skipped for stretch in new), known.last_seq)


def _count_anew(database: Database, tails: TailReader, producer_id: int) -> tuple[_Counted, dict[str, int]]:
    """What is counted of a producer, and the values to write, both of one snapshot."""
    columns = (t.producers.c.end_attempt, t.producers.c.received, t.producers.c.last_seq)
    with database.read() as connection:
        query = sa.select(*columns).where(t.producers.c.id == producer_id)
        row = connection.execute(query).one_or_none()
        values = count_attempts(connection, tails, producer_id)
    if row is None:  # deleted meanwhile
        return _NOTHING, values
    last_seq = row.last_seq if row.received == row.last_seq + 1 else -1  # of several some have not come
    return _Counted(row.end_attempt, values["attempts"], last_seq), values


def _addition(producer_id: int, stretch: Stretch) -> dict[str, int]:
    return {"counted": producer_id, "more": stretch.end - stretch.first, "skips": stretch.skipped}


def _stretch(batch: Batch) -> Stretch:
    table = batch.table(("found_inf",))
    attempts = table["attempt"]
    if not len(attempts) or (np.diff(attempts) != 1).any():
        return Stretch(_NOWHERE, _NOWHERE, 0, batch.seq)
    skipped = int(np.sum(table["found_inf"])) if "found_inf" in table else 0
    return Stretch(int(attempts[0]), int(attempts[-1]) + 1, skipped, batch.seq)
