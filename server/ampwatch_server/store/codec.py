"""Tables as bytes, without loss: columns in blocks, so that a plot of one column decodes few others.

Histograms, which are most of a tensor's rows and which few readers want, lie beside the columns as bytes of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ampwatch.records import Array, Table

from . import older
from .blocks import Block, Histograms, blocks_of, columns_of, histograms_of, pack_histograms, side_by_side

CODEC: Final = 3  # of `chunks.codec`; before, each column lay by itself, and histograms among them (older.py)


class Encoded(NamedTuple):
    """A table as it lies in the database: the codec, the columns, and the histograms where there are any."""

    codec: int
    data: bytes
    hist: bytes | None


class _Table(msgspec.Struct, array_like=True, frozen=True):
    rows: int
    columns: dict[str, tuple[int, int]]  # which block, and where in it
    blocks: list[msgspec.Raw]  # each decoded only where one of its columns is wanted


_DECODER: Final = msgspec.msgpack.Decoder(_Table)
_BLOCK: Final = msgspec.msgpack.Decoder(Block)
_HISTOGRAMS: Final = msgspec.msgpack.Decoder(Histograms)


def encode(table: Mapping[str, Array], version: int = CODEC) -> Encoded:
    """Columns of little-endian integers, flags or float64, and `hist` (rows, 64), as bytes.

    Arguments:
        version: of the codec, where servers before this one share the database.
    """
    if version < CODEC:
        return Encoded(version, older.encode(table, version), None)
    scalars = {name: column for name, column in table.items() if name != "hist"}
    hist = msgspec.msgpack.encode(pack_histograms(table["hist"])) if "hist" in table else None
    return Encoded(CODEC, _encode(scalars), hist)


def decode(data: bytes, names: Collection[str] | None = None, hist: bytes | None = None) -> Table:
    """The columns of `encode`, bit for bit but for the payload of a measured NaN; only `names` where given."""
    if older.is_older(data):
        return older.decode(data, names)
    table = _DECODER.decode(data)
    wanted: dict[int, list[str]] = defaultdict(list)
    for name, (block, _) in table.columns.items():
        if names is None or name in names:
            wanted[block].append(name)
    found: Table = {}
    for block, mine in wanted.items():
        places = dict.fromkeys(table.columns[name][1] for name in mine)
        columns = dict(
            zip(places, columns_of(_BLOCK.decode(table.blocks[block]), table.rows, [*places]), strict=True)
        )
        found |= {name: columns[table.columns[name][1]] for name in mine}
    if hist is not None and (names is None or "hist" in names):
        found["hist"] = histograms_of(_HISTOGRAMS.decode(hist))
    return found


def names(data: bytes) -> list[str]:
    """The names of the columns of `encode`."""
    return older.names(data) if older.is_older(data) else list(_DECODER.decode(data).columns)


def _encode(table: Mapping[str, Array]) -> bytes:
    """Columns that are one array are encoded once."""
    by_type: dict[str, dict[int, Array]] = defaultdict(dict)
    for column in table.values():
        by_type[column.dtype.str][id(column)] = column
    blocks: list[Block] = []
    places: dict[int, tuple[int, int]] = {}
    for columns in by_type.values():
        for some in side_by_side([*columns.items()], len(next(iter(columns.values())))):
            for block, chosen in blocks_of(np.stack([column for _, column in some])):
                places |= {some[at][0]: (len(blocks), i) for i, at in enumerate(chosen.tolist())}
                blocks.append(block)
    rows = len(next(iter(table.values()), ()))
    columns_at = {name: places[id(column)] for name, column in table.items()}
    return msgspec.msgpack.encode((rows, columns_at, blocks))
