"""What a command says where a part that it needs is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampwatch.errors import MissingExtra


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Import inside: a package that is not there becomes MissingExtra, a module of our own stays a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ampwatch"):
            raise
        raise MissingExtra(what, extra) from error
