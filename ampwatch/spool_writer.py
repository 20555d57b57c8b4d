"""The writing side of the spool (format and readers: spool.py), for one thread of one process.

Where room is short (room.py), what is dropped is what can be missed best: the producer's oldest tensor segments,
then its oldest attempts where attempts or events need their place, then what is new. Events go last: they may take
`EVENTS_OVER_BYTES` more than the bound, so that a folder full of old runs still takes the events of a new one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from . import records
from .errors import SpoolError
from .records import Batch, Kind
from .room import Left, Room
from .spool import HELD, frame

SEGMENT_BYTES: Final = 16 << 20
EVENTS_OVER_BYTES: Final = 16 << 20
KEPT_S: Final = 600.0  # how long a segment stays that the server has
REJECTED: Final = "rejected"
REJECTED_BYTES: Final = 16 << 20

_GIVEN_UP_FOR: Final[dict[Kind, tuple[Kind, ...]]] = {
    "tensors": ("tensors",),
    "attempts": ("tensors", "attempts"),
    "events": ("tensors", "attempts"),
}


class Dropped(NamedTuple):
    """Batches that were given up: their kind, the first and last of their sequence numbers, why, and how many."""

    kind: Kind
    first_seq: int
    last_seq: int
    reason: str
    batches: int = 1

    def holds(self, batch: Batch) -> bool:
        """Whether this batch is one of them."""
        return batch.kind == self.kind and self.first_seq <= batch.seq <= self.last_seq


@dataclass
class _Segment:
    path: Path
    first_seq: int
    last_seq: int
    size: int = 0
    batches: int = 0
    answered: float | None = None  # clock, s, when it was seen that the server has all of it


class SpoolWriter:
    """Writes the batches of one producer. One thread, one process, no locks.

    Arguments:
        directory: the folder of all runs.
        run, producer: as in the batches.
        max_bytes, min_free_bytes: bounds of `Room`.
        room: in their place.
        segment_bytes: size at which a segment is closed.
        clock: monotonic, in seconds.

    Errors: SpoolError where the folder cannot be made or written.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        producer: str,
        *,
        max_bytes: int,
        min_free_bytes: int | None = 0,
        room: Room | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = directory / run / producer
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_writable(self.path)
        except OSError as error:
            raise SpoolError(f"{directory} cannot be written: {error.strerror}") from error
        self._room = room or Room(directory, max_bytes, min_free_bytes)
        self._series = {kind: _Series(self.path, kind, segment_bytes) for kind in records.KINDS}
        self._clock = clock
        self._rejected_bytes = 0

    def write(self, batches: Sequence[Batch]) -> list[Dropped]:
        """Append batches, one `os.write` for each kind among them; answer what was given up for want of room.

        Errors: OSError where the file system refuses (ENOSPC, EDQUOT, EIO); nothing partial is left behind.
        """
        dropped: list[Dropped] = []
        for kind in records.KINDS:
            mine = [batch for batch in batches if batch.kind == kind]
            if mine:
                dropped += self._append(kind, mine)
        return dropped

    def hold(self, batch: Batch) -> None:
        """Lay aside events that wait to be told with others (`spool.held`): written over in place, one record.

        Errors: OSError where the file system refuses.
        """
        with contextlib.suppress(FileNotFoundError):  # the folder comes again with the next rows
            fd = os.open(self.path / HELD, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                _write_all(fd, frame(batch))
            finally:
                os.close(fd)

    def forget(self, answered_seq: int) -> None:
        """Delete closed segments of rows whose batches, all up to this number, were answered `KEPT_S` ago.

        Events stay: they are small, and a folder without them would not say what it is of.
        """
        now = self._clock()
        for kind in ("tensors", "attempts"):
            self._room.take(-self._series[kind].forget(answered_seq, now))

    def reject(self, batch: Batch, status: int) -> None:
        """Lay a copy of what the server refused into `rejected/`, as far as `REJECTED_BYTES` go."""
        data = frame(batch)
        self._rejected_bytes += len(data)
        if self._rejected_bytes <= REJECTED_BYTES and len(data) <= self._room.left(len(data)).bytes:
            folder = self.path / REJECTED
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / f"{batch.kind}-{batch.seq:06d}-{status}.awb").write_bytes(data)
            self._room.take(len(data))

    def close(self) -> None:
        """Bring the open segments to the disk and close them."""
        for series in self._series.values():
            series.close()

    def abandon(self) -> None:
        """Close the open segments as they are; what is written next goes into new ones."""
        for series in self._series.values():
            series.abandon()

    def _append(self, kind: Kind, batches: Sequence[Batch]) -> list[Dropped]:
        data = b"".join(map(frame, batches))
        left, dropped = self._make_room(kind, len(data))
        first, last = batches[0].seq, batches[-1].seq
        if len(data) > left.bytes:
            return [*dropped, Dropped(kind, first, last, left.bound, len(batches))]
        self._series[kind].append(data, first, last, len(batches))
        self._room.take(len(data))
        return dropped

    def _make_room(self, kind: Kind, needed_bytes: int) -> tuple[Left, list[Dropped]]:
        """What is left for a kind, after what may go for its sake has gone; and what that was."""
        left = self._room.left(needed_bytes)
        dropped: list[Dropped] = []
        for given_up in _GIVEN_UP_FOR[kind]:
            while needed_bytes > left.bytes and (gone := self._series[given_up].drop_oldest()):
                self._room.take(-gone.size)
                left = Left(left.bytes + gone.size, left.bound)
                dropped.append(Dropped(given_up, gone.first_seq, gone.last_seq, left.bound, gone.batches))
        if kind == "events" and left.bound == "spool_max_bytes":
            left = Left(left.bytes + EVENTS_OVER_BYTES, left.bound)
        return left, dropped


class _Series:
    """The segments of one kind: the open one, and the closed ones from the oldest on."""

    def __init__(self, path: Path, kind: Kind, segment_bytes: int) -> None:
        self._path, self._kind, self._segment_bytes = path, kind, segment_bytes
        self._count = 0
        self._fd = -1
        self._open: _Segment | None = None
        self._closed: list[_Segment] = []

    def append(self, data: bytes, first_seq: int, last_seq: int, batches: int) -> None:
        segment = self._segment_for(len(data), first_seq)
        try:
            _write_all(self._fd, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, segment.size)  # a torn record would hide what is written behind it
            raise
        segment.size += len(data)
        segment.last_seq = last_seq
        segment.batches += batches

    def drop_oldest(self) -> _Segment | None:
        if not self._closed:
            self.close()
        if not self._closed:
            return None
        segment = self._closed.pop(0)
        segment.path.unlink(missing_ok=True)
        return segment

    def forget(self, answered_seq: int, now: float) -> int:
        """Delete what was answered long ago; the bytes of it."""
        size = 0
        for segment in list(self._closed):
            if segment.last_seq > answered_seq:
                break
            segment.answered = now if segment.answered is None else segment.answered
            if now - segment.answered >= KEPT_S:
                segment.path.unlink(missing_ok=True)
                self._closed.remove(segment)
                size += segment.size
        return size

    def close(self) -> None:
        if self._open is None:
            return
        os.fsync(self._fd)
        os.close(self._fd)
        self._closed.append(self._open)
        self._open = None

    def abandon(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._closed.append(self._open)
            self._open = None

    def _segment_for(self, data_bytes: int, first_seq: int) -> _Segment:
        if self._open is not None and (
            self._open.size + data_bytes > self._segment_bytes or not _is_ours(self._fd, self._open.size)
        ):
            self.close()
        if self._open is None:
            path = self._path / f"{self._kind}-{self._count:06d}.awb"
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._count += 1
            self._open = _Segment(path, first_seq, first_seq)
        return self._open


def _is_ours(fd: int, size_bytes: int) -> bool:
    """Whether the file is as we left it. Where somebody deleted it or cut it, what is written there is not read."""
    there = os.fstat(fd)
    return there.st_nlink > 0 and there.st_size == size_bytes


def _write_all(fd: int, data: bytes) -> None:
    """One `os.write`, and more only where the system took less than was given (a signal, a full disk)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "permission denied", str(path))
