"""What a request may hold: bodies are decompressed within a bound, batches are decoded and checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard

from ampwatch import records
from ampwatch.errors import AmpwatchError, InvalidBatch
from ampwatch.records import Batch

from .store.windows import MAX_ATTEMPT

MAX_DEPTH: Final = 32  # of the data of an event
_LOOKED_AT: Final = frozenset({"attempt", "stream", "tensor", "found_inf", "loss"})
_URGENT: Final = frozenset({"skip", "call_fault", "fault", "check", "finish"})  # types of events
_INT64: Final = 2**63
_MAX_STREAM: Final = 2**31
_MAX_WINDOW: Final = 1 << 27  # zstd: memory that a frame may ask a decompressor for
_GZIP: Final = 16 + zlib.MAX_WBITS


class TooLarge(AmpwatchError):
    """A body over the bound, as sent or decompressed."""


class Extent(NamedTuple):
    """What is known of a batch once it is checked.

    Arguments:
        first, last: attempts of a table; -1 where it has none, as events.
        rows: of a table.
        is_urgent: it tells of something that a person would want to hear of soon.
    """

    first: int
    last: int
    rows: int = 0
    is_urgent: bool = False


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
    events = batch.events()
    for i, event in enumerate(events):
        for name in ("attempt", "step", "stream", "repeat"):
            if not -_INT64 <= getattr(event, name) < _INT64:
                raise InvalidBatch(f"events[{i}].{name}", "it must fit 64 bits")
        if _too_deep(event.data, MAX_DEPTH):
            raise InvalidBatch(f"events[{i}].data", f"it is nested deeper than {MAX_DEPTH}")
    return Extent(-1, -1, is_urgent=any(event.type in _URGENT for event in events))


def _check_table(batch: Batch) -> Extent:
    """What is not looked at here is checked for its form only: that costs a tenth of making arrays."""
    table = batch.table(_LOOKED_AT)
    attempt = table["attempt"]
    if not len(attempt):
        return Extent(-1, -1)
    first, last = _range_of(attempt, "attempt", MAX_ATTEMPT)
    for name in ("stream", "tensor"):
        if name in table and np.count_nonzero(table[name]):  # most jobs have one stream, 0
            _range_of(table[name], name, _MAX_STREAM)
    return Extent(first, last, len(attempt), _has_trouble(table))


def _range_of(column: records.Array, name: str, limit: int) -> tuple[int, int]:
    """Least and greatest of a column, both in 0 … limit - 1."""
    least, greatest = int(np.minimum.reduce(column)), int(np.maximum.reduce(column))
    if least < 0 or greatest >= limit:
        outside = column[(column < 0) | (column >= limit)]
        raise InvalidBatch(f"columns.{name}", f"got {outside[0]}, it must be in 0 … {limit - 1}")
    return least, greatest


def _has_trouble(table: records.Table) -> bool:
    """Whether a step was skipped, or a loss is not finite although it was measured."""
    if "found_inf" in table and np.count_nonzero(table["found_inf"]):
        return True
    loss = table.get("loss")
    if loss is None or np.count_nonzero(finite := np.isfinite(loss)) == len(loss):
        return False
    return not records.is_missing(loss[~finite]).all()


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
