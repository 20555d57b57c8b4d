"""Blocks: columns of one type side by side as bytes, without loss, narrowed, byte-shuffled and compressed by zstd.

Small columns cost calls and not bytes, so that many of them share a block; large ones have each its own. Of integers
the differences along the rows are kept, zigzag, so that what is near 0 on either side has high bytes of 0; of reals
that a float32 holds, that; of columns of one value only the value.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ampwatch.records import Array, is_missing
from ampwatch.stats.layout import HIST_BINS

T = TypeVar("T")

_LEVEL: Final = 1
_VALUES: Final = 1 << 14  # in a block of several columns, at most
_MISSING32: Final = 0x7FC0_07A2  # `records.MISSING` in a float32
_UNSIGNED: Final = ("<u1", "<u2", "<u4", "<u8")
_WORDS: Final = {1: "<u1", 8: "<u8"}  # to compare reals by their bits


class Block(msgspec.Struct, array_like=True, frozen=True):
    """Columns of `dtype` that lie in `data` as `stored`, one after the other; `rows` is 0 where each is one value."""

    dtype: str
    stored: str
    width: int
    rows: int
    data: bytes


class Histograms(msgspec.Struct, array_like=True, frozen=True):
    """Counts of the bins from `low` on, bin after bin; all others are 0."""

    low: int
    stored: str
    width: int
    rows: int
    data: bytes


class _Contexts(threading.local):
    """zstd's own memory, which costs more to make than a column to compress; one a thread."""

    def __init__(self) -> None:
        self.pack = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.unpack = zstandard.ZstdDecompressor().decompress


_CONTEXTS: Final = _Contexts()


def side_by_side(columns: Sequence[T], rows: int) -> Iterator[Sequence[T]]:
    """Columns of so many rows in groups that are worked on at once: calls cost as much as 16,384 values."""
    width = max(1, _VALUES // max(rows, 1))
    return (columns[start : start + width] for start in range(0, len(columns), width))


def blocks_of(columns: Array) -> Iterator[tuple[Block, Array]]:
    """Columns of one type, (width, rows), as blocks, each with the places of those that are in it."""
    if not columns.shape[1]:
        yield Block(columns.dtype.str, columns.dtype.str, len(columns), 0, b""), np.arange(len(columns))
        return
    words = columns.view(_WORDS[columns.itemsize])
    varies = (words != words[:, :1]).any(axis=1)
    if not varies.all():
        same = np.flatnonzero(~varies)
        yield Block(columns.dtype.str, columns.dtype.str, len(same), 0, columns[same, 0].tobytes()), same
    for stored, places in _stored(columns, np.flatnonzero(varies)):
        packed = pack_shuffled(stored)
        yield Block(columns.dtype.str, stored.dtype.str, len(places), stored.shape[1], packed), places


def columns_of(block: Block, rows: int, places: Sequence[int]) -> Array:
    """Some columns of a block, (places, rows), bit for bit but for the payload of a measured NaN."""
    if not block.rows:
        values = (
            np.frombuffer(block.data, block.dtype)[list(places)]
            if rows
            else np.empty(len(places), block.dtype)
        )
        return np.repeat(values[:, None], rows, axis=1)
    stored = unpack_shuffled(block.data, block.stored, block.width, list(places))
    if stored.dtype.kind == "f":
        return widened(stored)
    return np.cumsum(unzigzag(stored), axis=1, dtype=np.int64).astype(block.dtype, copy=False)


def pack_histograms(hist: Array) -> Histograms:
    """Counts, (rows, 64), none of them negative."""
    highest = hist.max(axis=0, initial=0)
    used = np.flatnonzero(highest)
    low, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    signed = np.int32 if highest.max() < 2**31 else np.int64
    counts = np.ascontiguousarray(hist[:, low:end].T, dtype=signed)
    stored = narrowed(zigzag(np.diff(counts, prepend=signed(0))))
    return Histograms(low, stored.dtype.str, end - low, len(hist), pack_shuffled(stored))


def histograms_of(packed: Histograms) -> npt.NDArray[np.int64]:
    """The counts of `pack_histograms`."""
    found = np.zeros((packed.rows, HIST_BINS), np.int64)
    if packed.width and packed.rows:
        stored = unpack_shuffled(packed.data, packed.stored, packed.width)
        counts = np.cumsum(unzigzag(stored), axis=1, dtype=np.int64)
        found[:, packed.low : packed.low + packed.width] = counts.T
    return found


def pack_shuffled(stored: Array) -> bytes:
    """First bytes, second bytes, …, compressed."""
    as_bytes = stored.reshape(-1).view(np.uint8).reshape(-1, stored.itemsize)
    return _CONTEXTS.pack(as_bytes.T.tobytes())


def unpack_shuffled(data: bytes, dtype: str, width: int, places: Sequence[int] | None = None) -> Array:
    """The (width, rows) array of `pack_shuffled`, or some of its columns."""
    size = np.dtype(dtype).itemsize
    raw = np.frombuffer(_CONTEXTS.unpack(data), np.uint8).reshape(size, width, -1)
    chosen = raw if places is None or len(places) == width == 1 else raw[:, places]
    return np.ascontiguousarray(chosen.transpose(1, 2, 0)).view(dtype)[:, :, 0]


def zigzag(values: Array) -> Array:
    """Signed integers as unsigned ones of the same size, small where the value is near 0."""
    unsigned: Array = ((values << 1) ^ (values >> (8 * values.itemsize - 1))).view(f"<u{values.itemsize}")
    return unsigned


def unzigzag(values: Array) -> Array:
    """In the signed type of the same size."""
    signed: Array = ((values >> 1) ^ -(values & 1)).view(f"<i{values.itemsize}")
    return signed


def narrowed(values: Array) -> Array:
    """Unsigned integers in the smallest type that holds them."""
    return values.astype(_width_for(values.max(initial=0)), copy=False)


def widened(stored: Array) -> npt.NDArray[np.float64]:
    """Reals as float64, missing ones as such."""
    if stored.itemsize == 8:
        return stored
    wide = stored.astype("<f8")
    wide.view(np.uint64)[stored.view(np.uint32) == _MISSING32] = 0x7FF8_0000_0000_07A2
    return wide


def narrow_reals(reals: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float32], Array]:
    """Columns of reals, (width, rows), as float32, and which of them survive it: torch computes in float32 anyway."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = reals.astype("<f4")
        same = narrow.astype(np.float64) == reals
    if not same.all():
        same |= np.isnan(reals)
        narrow.view(np.uint32)[is_missing(reals)] = _MISSING32
    return narrow, same.all(axis=1)


def _stored(columns: Array, places: Array) -> Iterator[tuple[Array, Array]]:
    """Columns as they are stored, those together that are stored alike, each with its place."""
    if not len(places):
        return
    given = columns if len(places) == len(columns) else columns[places]
    if columns.dtype.kind == "f":
        narrow, fits = narrow_reals(given)
        if fits.any():
            yield narrow[fits], places[fits]
        if not fits.all():
            yield given[~fits], places[~fits]
        return
    coded = zigzag(np.diff(given.astype(np.int64, copy=False), prepend=np.int64(0)))
    types = np.array([_width_for(highest) for highest in coded.max(axis=1).tolist()])
    for dtype in sorted(set(types.tolist())):
        alike = types == dtype
        yield coded[alike].astype(dtype), places[alike]


def _width_for(highest: int) -> str:
    return next(dtype for dtype in _UNSIGNED if highest <= np.iinfo(dtype).max)
