"""Columns as bytes, without loss: delta-coded, narrowed, byte-shuffled, compressed by zstd.

Each column is compressed by itself, so that a plot of one column decodes no other.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ampwatch.records import Array, Table, is_missing

CODEC: Final = (
    2  # of `chunks.codec`; 1, which `decode` still reads, had signed differences and plain histograms
)

_LEVEL: Final = 1
_MISSING32: Final = 0x7FC0_07A2  # `records.MISSING` in a float32
_SIGNED: Final = ("<i1", "<i2", "<i4", "<i8")
_SMALL_ROWS, _SMALL_BYTES = (
    1024,
    48,
)  # of a column that was perhaps decoded before: mostly one of a single value
_WORDS: Final = {1: "<u1", 8: "<u8"}  # to compare reals by their bits
_UNSIGNED: Final = ("<u1", "<u2", "<u4", "<u8")


class _Column(msgspec.Struct, array_like=True, frozen=True):
    dtype: str  # as it was given
    stored: str  # as it lies in `data`; unsigned: zigzag, so that what is near 0 on either side has high bytes of 0
    width: int
    delta: bool  # differences along the rows; of two dimensions column after column
    rows: int
    data: bytes


class _Contexts(threading.local):
    """zstd's own memory, which costs more to make than a column to compress; one a thread."""

    def __init__(self) -> None:
        self.pack = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.unpack = zstandard.ZstdDecompressor().decompress


_CONTEXTS: Final = _Contexts()
_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])  # copies no column
_DECODER: Final = msgspec.msgpack.Decoder(_Column)


def encode(table: Mapping[str, Array]) -> bytes:
    """Columns, 1-D or (rows, width), of little-endian integers, flags or float64, as bytes."""
    distinct = {id(array): array for array in table.values()}
    made = {key: _encode_any(array) for key, array in distinct.items()}
    return msgspec.msgpack.encode({name: made[id(array)] for name, array in table.items()})


def encode_first(table: Mapping[str, Array]) -> bytes:
    """The same in codec 1, for older servers on the same database."""
    return msgspec.msgpack.encode({name: _encode_column_first(array) for name, array in table.items()})


def decode(data: bytes, names: Collection[str] | None = None) -> Table:
    """The columns of `encode`, bit for bit but for the payload of a measured NaN; only `names` where given."""
    columns = _MAP.decode(data)
    wanted = columns if names is None else [name for name in columns if name in names]
    return {name: _decode_any(_DECODER.decode(columns[name])) for name in wanted}


def names(data: bytes) -> list[str]:
    """The names of the columns of `encode`."""
    return list(_MAP.decode(data))


def _encode_any(array: Array) -> _Column:
    """Columns of one value, which are many, are encoded once."""
    if array.ndim == 1 and len(array):
        value = array[:1].tobytes()
        if (
            array.itemsize in _WORDS
            and (array.view(_WORDS[array.itemsize]) == np.frombuffer(value, _WORDS[array.itemsize])).all()
        ):
            return _encode_constant(array.dtype.str, value, len(array))
    return _encode_column(array)


@lru_cache(maxsize=4096)
def _encode_constant(dtype: str, value: bytes, rows: int) -> _Column:
    return _encode_column(np.repeat(np.frombuffer(value, dtype), rows))


def _decode_any(column: _Column) -> Array:
    return (
        _decode_small(column)
        if column.rows <= _SMALL_ROWS and len(column.data) <= _SMALL_BYTES
        else _decode_column(column)
    )


@lru_cache(maxsize=1024)
def _decode_small(column: _Column) -> Array:
    array = _decode_column(column)
    array.flags.writeable = False  # others get it too
    return array


def _encode_column(array: Array) -> _Column:
    width = array.shape[1] if array.ndim == 2 else 1
    delta = array.dtype.kind == "i"
    if array.dtype.kind == "f":
        stored = _narrow_real(array)
    else:
        whole = np.ascontiguousarray(array.T, dtype=np.int64)
        stored = _narrow_integer(_zigzag(np.diff(whole, prepend=np.int64(0)) if delta else whole))
    return _Column(array.dtype.str, stored.dtype.str, width, delta, len(array), _shuffled(stored))


def _encode_column_first(array: Array) -> _Column:
    width = array.shape[1] if array.ndim == 2 else 1
    delta = array.dtype.kind == "i" and array.ndim == 1
    if array.dtype.kind == "f":
        stored = _narrow_real(array)
    else:
        whole = np.ascontiguousarray(array, dtype=np.int64)
        stored = _narrow_signed(np.diff(whole, prepend=np.int64(0)) if delta else whole)
    return _Column(array.dtype.str, stored.dtype.str, width, delta, len(array), _shuffled(stored))


def _shuffled(stored: Array) -> bytes:
    """First bytes, second bytes, …, compressed."""
    as_bytes = np.frombuffer(stored.tobytes(), np.uint8).reshape(-1, stored.dtype.itemsize)
    return _CONTEXTS.pack(as_bytes.T.tobytes())


def _decode_column(column: _Column) -> Array:
    dtype = np.dtype(column.stored)
    raw = np.frombuffer(_CONTEXTS.unpack(column.data), np.uint8)
    flat = np.frombuffer(raw.reshape(dtype.itemsize, -1).T.tobytes(), dtype)
    if dtype.kind == "f":
        return _widen_real(flat)
    values = _unzigzag(flat) if dtype.kind == "u" else flat
    if column.delta:
        values = np.cumsum(values.reshape(column.width, column.rows), axis=1, dtype=np.int64)
    values = values.astype(column.dtype, copy=False)
    if column.width == 1:
        return values.reshape(-1)
    return values.T if column.delta else values.reshape(column.rows, column.width)


def _zigzag(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _unzigzag(values: Array) -> Array:
    """In the signed type of the same size, or int64."""
    return ((values >> 1) ^ -(values & 1)).view(f"<i{values.dtype.itemsize}")


def _narrow_real(array: npt.NDArray[np.float64]) -> Array:
    """float32 where every value survives it: torch computes losses and norms in float32 anyway."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = array.astype("<f4")
        exact = (narrow.astype(np.float64) == array) | np.isnan(array)
    if not exact.all():
        return array
    narrow.view(np.uint32)[is_missing(array)] = _MISSING32
    return narrow


def _widen_real(flat: Array) -> npt.NDArray[np.float64]:
    if flat.dtype.itemsize == 8:
        return flat
    wide = flat.astype("<f8")
    wide.view(np.uint64)[flat.view(np.uint32) == _MISSING32] = 0x7FF8_0000_0000_07A2
    return wide


def _narrow_integer(array: npt.NDArray[np.uint64]) -> Array:
    highest = array.max(initial=0)
    return array.astype(next(dtype for dtype in _UNSIGNED if highest <= np.iinfo(dtype).max))


def _narrow_signed(array: npt.NDArray[np.int64]) -> Array:
    low, high = array.min(initial=0), array.max(initial=0)
    fits = (dtype for dtype in _SIGNED if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return array.astype(next(fits))
