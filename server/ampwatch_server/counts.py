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
    """Attempts first <= attempt < end, each recorded once, and how many of them were skipped."""

    first: int
    end: int
    skipped: int


class _Counted(NamedTuple):
    """Where the attempts of a producer end that are counted, and the count that was written."""

    end: int
    attempts: int


_NOTHING: Final = _Counted(0, 0)
_BROKEN: Final = Stretch(-1, -1, 0)  # goes on from no attempt


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
            key: _Counted(stretch.end, stood[key] + stretch.end - stretch.first)
            for key, stretch in added.items()
        }
        self._upto |= {key: _Counted(end, values["attempts"]) for key, (end, values) in counted.items()}
        self._new, self.has_begun = {}, True

    def _going_on(self, row: Row[Any]) -> Stretch | None:
        """What came of a producer, where it goes on without a gap from what is counted of it; else None."""
        known = self._upto.get(row.id, _NOTHING)
        begin = known.end if known.attempts == row.attempts else None  # else another server has counted since
        end, new = begin, sorted(self._new.get(row.id, ()))
        for stretch in new:
            if stretch.first != end:
                return None
            end = stretch.end
        if begin is None or end is None or not new:
            return None
        return Stretch(begin, end, sum(stretch.skipped for stretch in new))


def _count_anew(database: Database, tails: TailReader, producer_id: int) -> tuple[int, dict[str, int]]:
    """Where the attempts of a producer end, and how many there are, both of one snapshot."""
    with database.read() as connection:
        query = sa.select(t.producers.c.end_attempt).where(t.producers.c.id == producer_id)
        return connection.execute(query).scalar() or 0, count_attempts(connection, tails, producer_id)


def _addition(producer_id: int, stretch: Stretch) -> dict[str, int]:
    return {"counted": producer_id, "more": stretch.end - stretch.first, "skips": stretch.skipped}


def _stretch(batch: Batch) -> Stretch:
    table = batch.table(("found_inf",))
    attempts = table["attempt"]
    if not len(attempts) or (np.diff(attempts) != 1).any():
        return _BROKEN
    skipped = int(np.sum(table["found_inf"])) if "found_inf" in table else 0
    return Stretch(int(attempts[0]), int(attempts[-1]) + 1, skipped)
