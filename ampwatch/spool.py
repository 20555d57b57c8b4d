"""Spool: batches on disk, written by one process, read by anyone at any time.

    DIR/<run>/<producer>/events-000000.awb      one series of segments a kind, in a folder of mode 0700
                         attempts-000000.awb
                         tensors-000000.awb
                         held.awb               events that wait to be told together with others, written over
                         rejected/ split/       not part of the record: what the server refused, what was cut for it

A segment is a sequence of records: length (u32, little-endian) and CRC-32 (u32) of the bytes of one batch
(`records.to_bytes`), then these bytes. A flush appends to each file by one `os.write`, with no buffer of ours:
what a flush wrote outlives the process, however it ends. `fsync` is called when a segment is closed, not at a
flush: a power cut may take what the operating system had not written yet, and training never waits for a disk.

No locks are taken, so that a file system without them will do. Readers change nothing. A record that is cut short or fails its checksum at the end of a
segment means "not yet".
"""

from __future__ import annotations

import heapq
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import records
from .errors import InvalidBatch, RunNotFound
from .records import Batch, Kind

_HEADER: Final = struct.Struct("<II")
HELD: Final = "held.awb"
SPLIT: Final = "split"
LARGEST_BYTES: Final = 64 << 20  # no record is longer; a damaged length mostly is
_SEGMENT = re.compile(r"(events|attempts|tensors)-(\d{6,})\.awb\Z")
_PRODUCER = re.compile(r"[0-9a-f]{32}\Z")


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
        """The new batches, those of one producer in their order.

        Errors: InvalidBatch or UnsupportedVersion for a record that cannot be read; the next call goes on
        behind it.
        """
        for producer in _producers(self.directory):
            yield from self.read_producer(producer)

    def read_producer(self, folder: Path) -> Iterator[Batch]:
        """The new batches of one producer, by its folder below this one."""
        series = map(self._read_series, _producers(folder).get(folder, {}).values())
        for name, end, batch in heapq.merge(*series, key=lambda found: found[2].seq):
            self._offsets[name] = end
            yield batch

    def _read_series(self, segments: Iterable[Path]) -> Iterator[tuple[str, int, Batch]]:
        for path in segments:
            name = path.relative_to(self.directory).as_posix()
            for data, end in _records(path, max(0, self._offsets.get(name, 0))):
                try:
                    batch = records.from_bytes(data)
                except InvalidBatch:
                    self._offsets[name] = end
                    raise
                yield name, end, batch


def read(directory: str | Path) -> Iterator[Batch]:
    """Every batch under a folder of all runs, of one run, or of one producer; each producer's in its order, and at the
    end what it holds.

    Errors: RunNotFound where there is no spool; InvalidBatch or UnsupportedVersion for a record that cannot be
    read.
    """
    root = Path(directory)
    if not (found := _producers(root)):
        raise nothing_recorded(root)
    tail = Tail(root)
    for producer in found:
        yield from tail.read_producer(producer)
        if (batch := held(producer)) is not None:
            yield batch


def held(folder: Path) -> Batch | None:
    """The events that a producer, by its folder, holds to tell them with others: None where they have been told.

    They are a batch with the number behind all others. Of a process that goes on they come later, in another batch.
    """
    try:
        batch = next(read_segment(folder / HELD), None)
        series = _producers(folder).get(folder, {})
        if batch is None or batch.kind != "events" or _last_seq(series.get("events", ())) >= batch.seq:
            return None
        parts = ([path] for path in folder.glob(f"{SPLIT}/*.awb"))
        last = max(map(_last_seq, [*series.values(), *parts]))
        key: dict[str, Any] = {
            "producer": batch.producer,
            "seq": last + 1,
            "run": batch.run,
            "rank": batch.rank,
        }
        return records.pack_events(batch.events(), **key)
    except InvalidBatch:
        return None


def _last_seq(segments: Sequence[Path]) -> int:
    """The highest number in segments in their order; -1 where there is none."""
    for path in reversed(segments):
        if seqs := [batch.seq for batch in read_segment(path)]:
            return max(seqs)
    return -1


def read_segment(path: Path) -> Iterator[Batch]:
    """The batches of one file. Errors: InvalidBatch or UnsupportedVersion for a record that cannot be read."""
    return (records.from_bytes(data) for data, _ in _records(path, 0))


def segments(directory: Path) -> dict[str, Path]:
    """The segments below a folder of all runs, of one run or of one producer, by their path below it."""
    by_kind = (series for kinds in _producers(directory).values() for series in kinds.values())
    return {path.relative_to(directory).as_posix(): path for series in by_kind for path in series}


def is_whole(directory: Path) -> bool:
    """Whether every process there still has its first rows: none was dropped, or deleted because a server has it."""
    kept = [series for kinds in _producers(directory).values() for series in kinds.values() if series]
    return all(series[0].stem.endswith("-000000") for series in kept)


def damaged(directory: Path, cursor: Mapping[str, int] | None = None) -> dict[Path, int]:
    """The segments with bytes that are no record and none being written, and the first of these bytes in each.

    Nothing is read from there on to the end of the segment. A tail of zeros is none: a power cut leaves one.

    Arguments:
        cursor: of a Tail of this folder; what it has read is not looked at again.
    """
    found = {}
    for name, path in segments(directory).items():
        begin = (cursor or {}).get(name, 0)
        end = max((end for _, end in _records(path, begin)), default=begin)
        if not _may_be_under_way(path, end):
            found[path] = end
    return found


def _may_be_under_way(path: Path, offset: int) -> bool:
    """Whether what stands from `offset` on is nothing, or the beginning of a record."""
    with path.open("rb") as file:
        left = file.seek(0, 2) - offset - _HEADER.size
        file.seek(offset)
        header = file.read(_HEADER.size)
    if left < 0:
        return True
    length, checksum = _HEADER.unpack(header)
    return (length, checksum) == (0, 0) or left < length <= LARGEST_BYTES


def run_directories(directory: str | Path) -> dict[str, Path]:
    """Folders by run id, from the oldest to the newest, under a folder of all runs, of one run or of one producer.

    Errors: RunNotFound where there is no spool.
    """
    root = Path(directory).absolute()
    found = _producers(root)
    if not found:
        raise nothing_recorded(Path(directory))
    oldest_first = sorted(found, key=lambda producer: producer.stat().st_mtime)
    return {path.parent.name: path if path == root else path.parent for path in oldest_first}


def nothing_recorded(directory: Path) -> RunNotFound:
    """The error that says why nothing can be read in a folder, and where runs would be."""
    if not directory.exists():
        return RunNotFound(
            f"{directory}: there is no such file or folder; a training job records in ampwatch_runs where it was "
            "started, or in its AMPWATCH_DIR"
        )
    below = sorted(
        {path.parents[2].name for path in directory.glob("*/*/*/*.awb") if _SEGMENT.match(path.name)}
    )
    if below:
        return RunNotFound(
            f"{directory}: runs were recorded in the folders below it; name one: {', '.join(below[:8])}"
        )
    return RunNotFound(f"{directory}: no run has been recorded there")


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


def _records(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """The bytes of the complete records from `offset` on, each with the offset behind it."""
    try:
        size = path.stat().st_size
        if size <= offset:
            return
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):  # its owner dropped it; it is no segment
        return
    with file:
        file.seek(offset)
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            offset += _HEADER.size + length
            # A damaged length shall not ask for memory; what was written meanwhile is read the next time.
            data = file.read(length) if offset <= size else b""
            # An empty record is never written; a power cut can leave a tail of zeros that looks like one.
            if not data or len(data) != length or zlib.crc32(data) != checksum:
                return
            yield data, offset


def frame(batch: Batch) -> bytes:
    """A batch as it stands in a segment."""
    data = records.to_bytes(batch)
    return _HEADER.pack(len(data), zlib.crc32(data)) + data
