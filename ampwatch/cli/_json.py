"""JSON as the commands print it."""

from __future__ import annotations

import json
from typing import Any

from ampwatch.records import to_json_value


def as_json(value: Any) -> str:
    """Builtins as indented JSON; NaN and infinities are strings, as in the REST API."""
    return json.dumps(_finite(value), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return to_json_value(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value
