"""Columns as bytes, without loss: narrowed, delta-coded, byte-shuffled, compressed by zstd.

Each column is compressed by itself, so that a plot of one column decodes no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ampwatch.records import Array, Table, is_missing

CODEC: Final = 1  # of `chunks.codec`

_LEVEL: Final = 3
_MISSING32: Final = 0x7FC0_07A2  # `records.MISSING` in a float32
_INTEGERS: Final = ("<i1", "<i2", "<i4", "<i8")


class _Column(msgspec.Struct, array_like=True):
    dtype: str  # as it was given
    stored: str  # as it lies in `data`
    width: int
    delta: bool
    rows: int
    data: bytes


_DECODER: Final = msgspec.msgpack.Decoder(dict[str, _Column])


def encode(table: Mapping[str, Array]) -> bytes:
    """Columns, 1-D or (rows, width), of little-endian integers, flags or float64, as bytes."""
    return msgspec.msgpack.encode({name: _encode_column(array) for name, array in table.items()})


def decode(data: bytes, names: Collection[str] | None = None) -> Table:
    """The columns of `encode`, bit for bit but for the payload of a measured NaN; only `names` where given."""
    columns = _DECODER.decode(data)
    return {name: _decode_column(c) for name, c in columns.items() if names is None or name in names}


def names(data: bytes) -> list[str]:
    """The names of the columns of `encode`."""
    return list(_DECODER.decode(data))


def _encode_column(array: Array) -> _Column:
    width = array.shape[1] if array.ndim == 2 else 1
    delta = array.dtype.kind == "i" and array.ndim == 1
    if array.dtype.kind == "f":
        stored = _narrow_real(array)
    else:
        whole = array.astype(np.int64)
        stored = _narrow_integer(np.diff(whole, prepend=np.int64(0)) if delta else whole)
    shuffled = np.frombuffer(stored.tobytes(), np.uint8).reshape(-1, stored.dtype.itemsize).T.tobytes()
    packed = zstandard.compress(shuffled, _LEVEL)
    return _Column(array.dtype.str, stored.dtype.str, width, delta, len(array), packed)


def _decode_column(column: _Column) -> Array:
    dtype = np.dtype(column.stored)
    raw = np.frombuffer(zstandard.decompress(column.data), np.uint8)
    flat = np.frombuffer(raw.reshape(dtype.itemsize, -1).T.tobytes(), dtype)
    if dtype.kind == "f":
        values: Array = _widen_real(flat)
    else:
        values = np.cumsum(flat, dtype=np.int64) if column.delta else flat
    values = values.astype(column.dtype, copy=False)
    return values.reshape(column.rows, column.width) if column.width > 1 else values


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


def _narrow_integer(array: npt.NDArray[np.int64]) -> Array:
    if not len(array):
        return array.astype("<i1")
    low, high = array.min(), array.max()
    for dtype in _INTEGERS:
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return array.astype(dtype)
    raise AssertionError("an int64 fits an int64")
