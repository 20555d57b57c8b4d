"""Following a spool directory: what a training job writes there comes in by the same path as a posted batch."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from ampwatch.errors import AmpwatchError, InvalidBatch
from ampwatch.records import Batch
from ampwatch.spool import Tail, damaged

from . import tables as t
from .chore import Chore
from .db import Database
from .inbox import Inbox, Overloaded, Stored
from .limits import check
from .writer import Unavailable

log = logging.getLogger(__name__)

POLL_S: Final = 0.5
LOOK_S: Final = 60.0  # between two looks for files that are damaged
_UNDER_WAY: Final = 64  # batches handed over and not committed yet


class Follower:
    """Reads a spool directory as it grows, and never changes it.

    Arguments:
        directory: folder of all runs, of one run or of one producer.
        inbox: takes the batches. database: knows which it has.
    """

    def __init__(self, directory: Path, inbox: Inbox, database: Database) -> None:
        self._directory, self._inbox, self._database = directory, inbox, database
        self._tail = Tail(directory)
        self._deleted: dict[str, float] | None = (
            None  # Unix time by run; what is deleted later has been read by then
        )
        self._under_way: deque[tuple[Batch, Future[Stored]]] = deque()
        self._damaged: set[Path] = set()  # told of
        self._look_at = 0.0
        self._chore = Chore("follower", self._read_on, POLL_S)

    def start(self) -> None:
        """Begin to follow."""
        self._chore.start()

    def stop(self) -> None:
        """End the thread."""
        self._chore.stop()

    def _read_on(self) -> None:
        try:
            self._read()
        except InvalidBatch as error:
            log.warning("%s: a record was passed over: %s", self._directory, error)
            self._chore.hurry()  # the tail stands behind it
        except OSError as error:
            log.warning("%s: %s; reading on in a moment", self._directory, error)

    def _read(self) -> None:
        if self._deleted is None:
            self._deleted = self._deletions()
        for batch in self._tail.read():
            if self._chore.is_stopping():
                return
            self._under_way.append((batch, self._submit(batch)))
            while len(self._under_way) > _UNDER_WAY:
                self._settle(*self._under_way.popleft())
        while self._under_way:
            self._settle(*self._under_way.popleft())
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            self._tell_damaged()

    def _tell_damaged(self) -> None:
        found = damaged(self._directory, self._tail.cursor)
        for path in found.keys() - self._damaged:
            log.warning("%s is damaged: nothing is read from its byte %d on", path, found[path])
        self._damaged |= found.keys()

    def _submit(self, batch: Batch) -> Future[Stored]:
        """Hand a batch over. What goes wrong is in the future."""
        known: Future[Stored] = Future()
        try:
            if not (self._has(batch) or self._is_deleted(batch)):
                return self._inbox.append(batch, check(batch), time=self._moment(batch))
            known.set_result(Stored(new=False))
        except AmpwatchError as error:
            known.set_exception(error)
        return known

    def _settle(self, batch: Batch, future: Future[Stored]) -> None:
        """Wait until a batch is stored; the tail has gone past it, so what cannot be stored now is tried again."""
        while not self._chore.is_stopping():
            try:
                future.result()
            except (Unavailable, Overloaded) as error:
                log.warning("%s: %s; trying again", self._directory, error)
                self._chore.pause(POLL_S)
                future = self._submit(batch)
            except AmpwatchError as error:
                log.warning("%s: a batch was passed over: %s", self._directory, error)
                return
            else:
                return

    def _has(self, batch: Batch) -> bool:
        """Whether a batch is stored: after a restart the whole folder is read again, and most of it is known."""
        joined = t.receipts.join(t.producers, t.producers.c.id == t.receipts.c.producer)
        query = sa.select(t.receipts.c.digest).select_from(joined)
        mine = query.where(t.producers.c.producer == batch.producer, t.receipts.c.seq == batch.seq)
        with self._database.read() as connection:
            return connection.execute(mine).scalar() == bytes.fromhex(batch.digest)

    def _deletions(self) -> dict[str, float]:
        last = sa.select(t.audit.c.subject, sa.func.max(t.audit.c.time).label("time"))
        deleted = last.where(t.audit.c.action == "delete").group_by(t.audit.c.subject)
        with self._database.read() as connection:
            return {row.subject: row.time for row in connection.execute(deleted)}

    def _is_deleted(self, batch: Batch) -> bool:
        """Whether its run was deleted after its producer last wrote: the next start shall not bring it back."""
        deleted = (self._deleted or {}).get(batch.run)
        written = self._written(batch) if deleted is not None else None
        return deleted is not None and written is not None and written <= deleted

    def _moment(self, batch: Batch) -> float | None:
        """When a batch was made, as far as that is known: processes of a folder that was copied keep their order."""
        written = self._written(batch)
        if batch.kind != "events" or written is None:
            return written
        return min(
            [written, *(event.time for event in batch.events() if event.type == "run" and event.time > 0)]
        )

    def _written(self, batch: Batch) -> float | None:
        """When its producer last wrote: a run of last week shall not look alive because it is read today."""
        folders = (
            self._directory / batch.run / batch.producer,
            self._directory / batch.producer,
            self._directory,
        )
        for folder in folders:
            files = [file.stat().st_mtime for file in folder.glob("*.awb")]
            if files:
                return max(files)
        return None
