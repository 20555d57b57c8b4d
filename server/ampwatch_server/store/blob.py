"""Values that keep NaN and infinities: msgpack in the database, strings and null in JSON."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from ampwatch.records import to_json_value


def pack(value: Any) -> bytes:
    """Builtins and msgspec structs as msgpack."""
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    """The builtins of `pack`."""
    return msgspec.msgpack.decode(data)


def jsonable(value: Any) -> Any:
    """Builtins as JSON can write them: "NaN", "Infinity", "-Infinity"; missing is None; keys are text."""
    if isinstance(value, float):
        return to_json_value(value)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
