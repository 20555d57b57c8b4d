"""Spool: batches on disk, written by one process, read by anyone at any time.

    DIR/<run>/<producer>/events-000000.awb      one series of segments a kind, in a folder of mode 0700
                         attempts-000000.awb
                         tensors-000000.awb

A segment is a sequence of records: length (u32, little-endian) and CRC-32 (u32) of the bytes of one batch
(`records.to_bytes`), then these bytes. A flush appends to each file by one `os.write`, with no buffer of ours:
what a flush wrote outlives the process, however it ends. `fsync` is called when a segment is closed, not at a
flush: a power cut may take what the operating system had not written yet, and training never waits for a disk.

Readers take no lock and change nothing. A record that is cut short or fails its checksum at the end of a
segment means "not yet".
"""

from __future__ import annotations

import heapq
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from . import records
from .errors import RunNotFound, SpoolError
from .records import Batch, Kind

SEGMENT_BYTES: Final = 16 << 20
_HEADER: Final = struct.Struct("<II")
_MAX_RECORD_BYTES: Final = 256 << 20
_SEGMENT = re.compile(r"(events|attempts|tensors)-(\d{6,})\.awb\Z")
_PRODUCER = re.compile(r"[0-9a-f]{32}\Z")
_EXPENDABLE: Final[tuple[Kind, ...]] = ("tensors", "attempts")  # what goes first where space is short


class Dropped(NamedTuple):
    """Batches that were given up: their kind, the first and last of their sequence numbers, and why."""

    kind: Kind
    first_seq: int
    last_seq: int
    reason: str

    def holds(self, batch: Batch) -> bool:
        """Whether this batch is one of them."""
        return batch.kind == self.kind and self.first_seq <= batch.seq <= self.last_seq


@dataclass
class _Segment:
    path: Path
    first_seq: int
    last_seq: int
    size: int = 0


class SpoolWriter:
    """Writes the batches of one producer. One thread, one process.

    Arguments:
        directory: the folder of all runs.
        run, producer: as in the batches.
        max_bytes: bound of the whole folder, other runs included. Over it this producer's oldest closed
            segments go, tensors before attempts; then new batches of these kinds are not written. Events
            always are.
        segment_bytes: size at which a segment is closed.

    Errors: SpoolError where the folder cannot be made or written.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        producer: str,
        *,
        max_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.path = directory / run / producer
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_writable(self.path)
        except OSError as error:
            raise SpoolError(f"{directory} cannot be written: {error.strerror}") from error
        self._directory, self._max_bytes = directory, max_bytes
        self._free_bytes = max_bytes - _size_of(directory)
        self._series = {kind: _Series(self.path, kind, segment_bytes) for kind in records.KINDS}

    def write(self, batches: Sequence[Batch]) -> list[Dropped]:
        """Append batches, one `os.write` for each kind among them; answer what was given up for want of space.

        Errors: OSError where the file system refuses (ENOSPC, EDQUOT, EIO); nothing partial is left behind.
        """
        dropped: list[Dropped] = []
        for kind in records.KINDS:
            mine = [batch for batch in batches if batch.kind == kind]
            if mine:
                dropped += self._append(kind, mine)
        return dropped

    def close(self) -> None:
        """Bring the open segments to the disk and close them."""
        for series in self._series.values():
            series.close()

    def _append(self, kind: Kind, batches: Sequence[Batch]) -> list[Dropped]:
        data = b"".join(map(_frame, batches))
        dropped = self._make_room(len(data))
        first, last = batches[0].seq, batches[-1].seq
        if len(data) > self._free_bytes and kind in _EXPENDABLE:
            return [*dropped, Dropped(kind, first, last, "spool_max_bytes")]
        self._series[kind].append(data, first, last)
        self._free_bytes -= len(data)
        return dropped

    def _make_room(self, needed_bytes: int) -> list[Dropped]:
        dropped: list[Dropped] = []
        if needed_bytes > self._free_bytes:  # measured again: somebody may have deleted old runs
            self._free_bytes = self._max_bytes - _size_of(self._directory)
        for kind in _EXPENDABLE:
            while needed_bytes > self._free_bytes and (gone := self._series[kind].drop_oldest()):
                self._free_bytes += gone.size
                dropped.append(Dropped(kind, gone.first_seq, gone.last_seq, "spool_max_bytes"))
        return dropped


class _Series:
    """The segments of one kind: the open one, and the closed ones from the oldest on."""

    def __init__(self, path: Path, kind: Kind, segment_bytes: int) -> None:
        self._path, self._kind, self._segment_bytes = path, kind, segment_bytes
        self._count = 0
        self._fd = -1
        self._open: _Segment | None = None
        self._closed: list[_Segment] = []

    def append(self, data: bytes, first_seq: int, last_seq: int) -> None:
        segment = self._segment_for(len(data), first_seq)
        try:
            _write_all(self._fd, data)
        except OSError:
            os.ftruncate(self._fd, segment.size)  # a torn record would hide what is written behind it
            raise
        segment.size += len(data)
        segment.last_seq = last_seq

    def drop_oldest(self) -> _Segment | None:
        if not self._closed:
            return None
        segment = self._closed.pop(0)
        segment.path.unlink(missing_ok=True)
        return segment

    def close(self) -> None:
        if self._open is None:
            return
        os.fsync(self._fd)
        os.close(self._fd)
        self._closed.append(self._open)
        self._open = None

    def _segment_for(self, data_bytes: int, first_seq: int) -> _Segment:
        if self._open is not None and self._open.size + data_bytes > self._segment_bytes:
            self.close()
        if self._open is None:
            path = self._path / f"{self._kind}-{self._count:06d}.awb"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._count += 1
            self._open = _Segment(path, first_seq, first_seq)
        return self._open


class Tail:
    """Reads a spool as it grows: each `read` yields the batches that were completed since the one before.

    Arguments:
        directory: the folder of all runs, of one run, or of one producer.
        cursor: a `cursor` of an earlier Tail of this folder, to go on from there.
    """

    def __init__(self, directory: Path, cursor: Mapping[str, int] | None = None) -> None:
        self.directory = directory
        self._offsets = dict(cursor or {})

    @property
    def cursor(self) -> dict[str, int]:
        """Bytes read of each segment by its path below the folder: JSON-ready."""
        return dict(self._offsets)

    def read(self) -> Iterator[Batch]:
        """The new batches; those of one producer and kind in their order, events first.

        Errors: InvalidBatch or UnsupportedVersion for a record that cannot be read; the next call goes on
        behind it.
        """
        for segments in _producers(self.directory).values():
            for path in (path for kind in records.KINDS for path in segments[kind]):
                yield from self._read_segment(path)

    def _read_segment(self, path: Path) -> Iterator[Batch]:
        name = path.relative_to(self.directory).as_posix()
        for data, end in _records(path, self._offsets.get(name, 0)):
            self._offsets[name] = end
            yield records.from_bytes(data)


def read(directory: str | Path) -> Iterator[Batch]:
    """Every batch under a folder of all runs, of one run, or of one producer; each producer's in its order.

    Errors: RunNotFound where there is no spool; InvalidBatch or UnsupportedVersion for a record that cannot be
    read.
    """
    found = _producers(Path(directory))
    if not found:
        raise RunNotFound(f"{directory}: no run has been recorded there")
    for segments in found.values():
        yield from heapq.merge(*map(_read_series, segments.values()), key=lambda batch: batch.seq)


def run_directories(directory: str | Path) -> dict[str, Path]:
    """Folders by run id, from the oldest to the newest, under a folder of all runs, of one run or of one producer.

    Errors: RunNotFound where there is no spool.
    """
    root = Path(directory).absolute()
    found = _producers(root)
    if not found:
        raise RunNotFound(f"{directory}: no run has been recorded there")
    oldest_first = sorted(found, key=lambda producer: producer.stat().st_mtime)
    return {path.parent.name: path if path == root else path.parent for path in oldest_first}


def _producers(directory: Path) -> dict[Path, dict[Kind, list[Path]]]:
    """Segments by producer's folder and kind, in their order. A folder that vanishes meanwhile is left out."""
    found: dict[Path, dict[Kind, list[Path]]] = {}
    for pattern in ("*.awb", "*/*.awb", "*/*/*.awb"):
        for path in sorted(directory.glob(pattern)):
            named = _SEGMENT.match(path.name)
            if named and _PRODUCER.match(path.absolute().parent.name):
                series = found.setdefault(path.parent, {kind: [] for kind in records.KINDS})
                series[named[1]].append(path)  # type: ignore[index]
    return found


def _read_series(segments: Iterable[Path]) -> Iterator[Batch]:
    for path in segments:
        for data, _ in _records(path, 0):
            yield records.from_bytes(data)


def _records(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """The bytes of the complete records from `offset` on, each with the offset behind it."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # its owner dropped it
        return
    with file:
        file.seek(offset)
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            data = file.read(length) if length <= _MAX_RECORD_BYTES else b""
            # An empty record is never written; a power cut can leave a tail of zeros that looks like one.
            if not data or len(data) != length or zlib.crc32(data) != checksum:
                return
            offset += _HEADER.size + length
            yield data, offset


def _frame(batch: Batch) -> bytes:
    data = records.to_bytes(batch)
    return _HEADER.pack(len(data), zlib.crc32(data)) + data


def _write_all(fd: int, data: bytes) -> None:
    """One `os.write`, and more only where the system took less than was given (a signal, a full disk)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(13, "permission denied", str(path))


def _size_of(directory: Path) -> int:
    """Bytes of all segments below the folder of all runs."""
    total = 0
    for path in directory.glob("*/*/*.awb"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # its owner dropped it meanwhile
            continue
    return total
