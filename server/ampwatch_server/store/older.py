"""The codecs before this one's: read for ever, and written while servers that know no other share the database.

Each column is compressed by itself. The first had signed differences and histograms row by row, the second zigzag
and histograms bin by bin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ampwatch.records import Array, Table

from .blocks import narrow_reals, narrowed, pack_shuffled, unpack_shuffled, unzigzag, widened, zigzag

_MAPS: Final = (0x80, 0xDE, 0xDF)  # how msgpack begins a map: of at most 15, or of more
_SIGNED: Final = ("<i1", "<i2", "<i4", "<i8")


class _Column(msgspec.Struct, array_like=True, frozen=True):
    dtype: str  # as it was given
    stored: str  # as it lies in `data`; unsigned: zigzag
    width: int
    delta: bool  # differences along the rows; of two dimensions column after column
    rows: int
    data: bytes


_MAP: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])  # copies no column
_DECODER: Final = msgspec.msgpack.Decoder(_Column)


def is_older(data: bytes) -> bool:
    """Whether bytes are of a codec before the third: a map of columns."""
    return data[0] & 0xF0 == _MAPS[0] or data[0] in _MAPS


def encode(table: Mapping[str, Array], version: int) -> bytes:
    """Columns, 1-D or (rows, width), of little-endian integers, flags or float64, in codec 1 or 2."""
    encode_column = _first if version == 1 else _second
    return msgspec.msgpack.encode({name: encode_column(array) for name, array in table.items()})


def decode(data: bytes, names: Collection[str] | None = None) -> Table:
    """The columns of `encode`, bit for bit but for the payload of a measured NaN; only `names` where given."""
    columns = _MAP.decode(data)
    wanted = columns if names is None else [name for name in columns if name in names]
    return {name: _decode(_DECODER.decode(columns[name])) for name in wanted}


def names(data: bytes) -> list[str]:
    """The names of the columns of `encode`."""
    return list(_MAP.decode(data))


def _first(array: Array) -> _Column:
    delta = array.dtype.kind == "i" and array.ndim == 1
    if array.dtype.kind == "f":
        return _column(array, _reals(array), delta=False)
    whole = np.ascontiguousarray(array, dtype=np.int64)
    return _column(
        array, _narrow_signed(np.diff(whole, prepend=np.int64(0)) if delta else whole), delta=delta
    )


def _second(array: Array) -> _Column:
    delta = array.dtype.kind == "i"
    if array.dtype.kind == "f":
        return _column(array, _reals(array), delta=False)
    whole = np.ascontiguousarray(array.T, dtype=np.int64)
    return _column(
        array, narrowed(zigzag(np.diff(whole, prepend=np.int64(0)) if delta else whole)), delta=delta
    )


def _column(array: Array, stored: Array, *, delta: bool) -> _Column:
    width = array.shape[1] if array.ndim == 2 else 1
    return _Column(array.dtype.str, stored.dtype.str, width, delta, len(array), pack_shuffled(stored))


def _decode(column: _Column) -> Array:
    flat = unpack_shuffled(column.data, column.stored, 1)[0]
    if flat.dtype.kind == "f":
        return widened(flat)
    values = unzigzag(flat) if flat.dtype.kind == "u" else flat
    if column.delta:
        values = np.cumsum(values.reshape(column.width, column.rows), axis=1, dtype=np.int64)
    values = values.astype(column.dtype, copy=False)
    if column.width == 1:
        return values.reshape(-1)
    return values.T if column.delta else values.reshape(column.rows, column.width)


def _reals(array: npt.NDArray[np.float64]) -> Array:
    narrow, fits = narrow_reals(array[None])
    return narrow[0] if fits[0] else array


def _narrow_signed(array: npt.NDArray[np.int64]) -> Array:
    low, high = array.min(initial=0), array.max(initial=0)
    fits = (dtype for dtype in _SIGNED if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return array.astype(next(fits))
