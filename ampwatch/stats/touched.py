"""How a kernel tells that it failed too late for another to do its work: gradients are not to be divided twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Touched(Exception):
    """A pass has failed after it began to write: some gradients are unscaled, and which is not known.

    Arguments:
        error: what it failed of; also the cause.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.__cause__ = error


@contextmanager
def touching(writes: bool = True) -> Iterator[None]:
    """Around what writes gradients: an Exception in here is raised as `Touched`, unless nothing `writes`."""
    try:
        yield
    except Touched:
        raise
    except Exception as error:
        if not writes:
            raise
        raise Touched(error) from error
