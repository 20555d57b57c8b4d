"""What a request may hold: bodies are decompressed within a bound, batches are decoded and checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import zstandard

from ampwatch import records
from ampwatch.errors import AmpwatchError, InvalidBatch
from ampwatch.records import Batch

from .store.windows import MAX_ATTEMPT

MAX_DEPTH: Final = 32  # of the data of an event
_INT64: Final = 2**63
_MAX_STREAM: Final = 2**31
_MAX_WINDOW: Final = 1 << 27  # zstd: memory that a frame may ask a decompressor for
_GZIP: Final = 16 + zlib.MAX_WBITS


class TooLarge(AmpwatchError):
    """A body over the bound, as sent or decompressed."""


class Extent(NamedTuple):
    """First and last attempt of a table, -1 where it has none, as events; and how many rows it has."""

    first: int
    last: int
    rows: int = 0


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """A body without its Content-Encoding ("", "identity", "gzip" or "zstd"), at most `limit` bytes of it.

    Never holds more than `limit` and a buffer, whatever the body unpacks to.
    Errors: TooLarge, InvalidBatch for a damaged stream.
    """
    try:
        data = _UNPACK[encoding](body, limit + 1)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidBatch("body", f"it is not {encoding}: {error}") from error
    if len(data) > limit:
        raise TooLarge(f"the body unpacks to more than {limit:,} bytes; send fewer rows in a batch")
    return data


def read_batch(data: bytes, *, json: bool) -> tuple[Batch, Extent]:
    """Decode a batch and check all of it. InvalidBatch or UnsupportedVersion names the field."""
    try:
        batch = records.from_json(data) if json else records.from_bytes(data)
    except OverflowError as error:
        raise InvalidBatch("body", f"a number is out of range: {error}") from error
    return batch, check(batch)


def check(batch: Batch) -> Extent:
    """Decode the body and check what the store relies on. InvalidBatch names the field and the reason."""
    if batch.kind != "events":
        return _check_table(batch)
    for i, event in enumerate(batch.events()):
        for name in ("attempt", "step", "stream", "repeat"):
            if not -_INT64 <= getattr(event, name) < _INT64:
                raise InvalidBatch(f"events[{i}].{name}", "it must fit 64 bits")
        if _too_deep(event.data, MAX_DEPTH):
            raise InvalidBatch(f"events[{i}].data", f"it is nested deeper than {MAX_DEPTH}")
    return Extent(-1, -1)


def _check_table(batch: Batch) -> Extent:
    table = batch.table()
    attempt = table["attempt"]
    if not len(attempt):
        return Extent(-1, -1)
    _check_range(attempt, "attempt", MAX_ATTEMPT)
    for name in ("stream", "tensor"):
        if name in table:
            _check_range(table[name], name, _MAX_STREAM)
    return Extent(int(attempt.min()), int(attempt.max()), len(attempt))


def _check_range(column: records.Array, name: str, limit: int) -> None:
    if column.min() < 0 or column.max() >= limit:
        outside = column[(column < 0) | (column >= limit)]
        raise InvalidBatch(f"columns.{name}", f"got {outside[0]}, it must be in 0 … {limit - 1}")


def _too_deep(value: Any, left: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    if left == 0:
        return True
    children = value.values() if isinstance(value, dict) else value
    return any(_too_deep(child, left - 1) for child in children)


def _gunzip(body: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=_GZIP)
    data = stream.decompress(body, limit)
    if len(data) < limit and not stream.eof:
        raise EOFError("it ends too early")
    return data


def _unzstd(body: bytes, limit: int) -> bytes:
    stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(body)
    data: bytes = stream.read(limit)
    return data


_UNPACK: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "": lambda body, _: body,
    "identity": lambda body, _: body,
    "gzip": _gunzip,
    "zstd": _unzstd,
}
ENCODINGS: Final = frozenset(_UNPACK)
