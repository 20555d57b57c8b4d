"""Cursors: opaque text that says after which key a list goes on."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from ampwatch.errors import InvalidBatch


class InvalidCursor(InvalidBatch):
    """A cursor that no list of this server gave."""

    def __init__(self) -> None:
        super().__init__("cursor", "it must be the `next` of an earlier answer to the same request")


def write_cursor(key: tuple[Any, ...]) -> str:
    """A cursor for a key of numbers and text."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(key)).decode().rstrip("=")


def read_cursor(cursor: str | None, types: tuple[type, ...]) -> tuple[Any, ...] | None:
    """The key of a cursor; None without one. InvalidCursor where it is none of a list with such keys."""
    if not cursor:
        return None
    try:
        key = msgspec.msgpack.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidCursor from error
    if not isinstance(key, list) or len(key) != len(types) or not all(map(_storable, key, types)):
        raise InvalidCursor
    return tuple(key)


def _storable(value: Any, kind: type) -> bool:
    """Whether a value is of its kind, and one that both databases take."""
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return "\x00" not in value
    return isinstance(value, (int, float)) and -(2**63) <= value < 2**63
