"""Keeper: the spool of a producer, and what is done where it cannot be written. Recorder's thread only.

| trouble | what is done |
|---|---|
| the folder cannot be made or written | no spool |
| the disk is full, or the quota (ENOSPC, EDQUOT, EFBIG) | no spool from there on: the next bytes may be a checkpoint's |
| another failure (a server of files that is away) | what comes in the next `RETRY_S` is lost, then a new segment |
| no room within the bounds of room.py | the least needed goes (spool_writer.py) |

Each is told once. What is lost is in `Tombstones`.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .errors import SpoolError
from .records import Batch
from .room import MIN_FREE_BYTES, MIN_FREE_SHARE
from .settings import PREFIX, Settings
from .spool_writer import Dropped, SpoolWriter
from .tombstones import Tombstones

RETRY_S: Final = 60.0
FULL: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
)  # the last: a limit of the process on a file

UNTIL_FAILURE: Final = "up to where writing failed"
BUT_FOR_FAILURES: Final = "but for what could not be written"
WITHIN: Final = {
    "spool_max_bytes": f"as far as {PREFIX}SPOOL_MAX_BYTES left room",
    "spool_min_free_bytes": f"as far as {PREFIX}SPOOL_MIN_FREE_BYTES left room",
}


class Keeper:
    """Keeps the batches of one producer on the disk, as far as that goes.

    Arguments:
        settings: `dir` and the bounds.
        run, producer: as in the batches.
        tell: given a sentence for the job's log, once for each trouble.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        producer: str,
        tell: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._run, self._producer = settings, run, producer
        self._tell, self._clock = tell, clock
        self._spool: SpoolWriter | None = None
        self._retry_at = 0.0
        self._answered_seq = -1
        self._told: set[str] = set()
        self.part = ""  # what of the run is kept, where that is not all of it
        self.lost = Tombstones()

    @property
    def is_writing(self) -> bool:
        """Whether there is a spool."""
        return self._spool is not None

    @property
    def folder(self) -> Path:
        """Where the batches lie."""
        return self._settings.dir / self._run / self._producer

    def open(self) -> None:
        """Make the folder."""
        settings = self._settings
        bounds = {"max_bytes": settings.spool_max_bytes, "min_free_bytes": settings.spool_min_free_bytes}
        try:
            self._spool = SpoolWriter(settings.dir, self._run, self._producer, **bounds)  # type: ignore[arg-type]
        except SpoolError as error:
            self._miss(UNTIL_FAILURE, str(error))

    def write(self, batches: Sequence[Batch]) -> set[int]:
        """Write batches; the sequence numbers of those that were."""
        if self._spool is None or self._clock() < self._retry_at:
            return set()
        try:
            dropped = self._spool.write(batches)
        except OSError as error:
            self._fail(error)
            return set()
        lost = [each for each in dropped if each.last_seq > self._answered_seq]  # the server has the others
        if lost:
            self._tell_short(lost[-1].reason)
        self.lost.add(lost)
        return {batch.seq for batch in batches if not any(each.holds(batch) for each in dropped)}

    def hold(self, batch: Batch) -> None:
        """Keep what is not told yet, see `SpoolWriter.hold`."""
        if self._spool is None or self._clock() < self._retry_at:
            return
        try:
            self._spool.hold(batch)
        except OSError as error:
            self._fail(error)

    def forget(self, answered_seq: int) -> None:
        """Delete what the server has had for a while, see `SpoolWriter.forget`."""
        self._answered_seq = answered_seq
        if self._spool is not None:
            self._spool.forget(answered_seq)

    def reject(self, batch: Batch, status: int) -> None:
        """Keep apart, and record, what the server refused."""
        self.lost.add([Dropped(batch.kind, batch.seq, batch.seq, refusal(status))])
        if self._spool is not None:
            with contextlib.suppress(OSError):
                self._spool.reject(batch, status)

    def miss(self, batches: Sequence[Batch], reason: str) -> None:
        """Record what neither disk nor server took."""
        unknown = [batch for batch in batches if not self.lost.holds(batch)]
        self.lost.add(Dropped(batch.kind, batch.seq, batch.seq, reason) for batch in unknown)

    def close(self) -> None:
        """Bring what was written to the disk. OSError where that fails."""
        if self._spool is not None:
            self._spool.close()

    def _fail(self, error: OSError) -> None:
        assert self._spool is not None
        self._spool.abandon()
        what = f"{self._settings.dir} cannot be written any more: {error.strerror}"
        if error.errno in FULL:
            self._spool = None
            self._miss(UNTIL_FAILURE, what)
        else:
            self._retry_at = self._clock() + RETRY_S
            self._miss(BUT_FOR_FAILURES, f"{what}; trying again every {RETRY_S:g} s")

    def _miss(self, part: str, what: str) -> None:
        self.part = part
        if part not in self._told:
            self._told.add(part)
            self._tell(what)

    def _tell_short(self, bound: str) -> None:
        """Say it at the first drop: what other runs take up is left alone, so only a person can make room."""
        settings = self._settings
        dropped = "Of this run tensor statistics and attempts are dropped, events go last."
        if bound == "spool_max_bytes":
            size = f"{settings.spool_max_bytes:,}"
            why = f"{settings.dir} is full: all runs there together may take {size} bytes. {dropped} "
            cure = f"Delete the folders of old runs in it, or raise {PREFIX}SPOOL_MAX_BYTES"
        else:
            why = f"the disk of {settings.dir} has too little space left: {_floor(settings)} stay free. {dropped} "
            cure = f"Make room, or lower {PREFIX}SPOOL_MIN_FREE_BYTES"
        self._miss(WITHIN[bound], why + cure)


def refusal(status: int) -> str:
    """Why a batch was given up that was answered so; 0 where it was not sent."""
    return f"refused by the server ({status})" if status else "it could not be sent"


def _floor(settings: Settings) -> str:
    if settings.spool_min_free_bytes is None:
        return f"{MIN_FREE_BYTES:,} bytes and {MIN_FREE_SHARE:.0%} of it"
    return f"{settings.spool_min_free_bytes:,} bytes"
