"""Headers of a request as they came: before a small batch is stored, six are looked at, each in a microsecond."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a header; None where the request has none. Arguments: the name, in lower case."""
    for given, value in scope["headers"]:
        if given == name:
            return str(value, "latin-1")
    return None
