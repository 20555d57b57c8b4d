"""When something happened."""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Moment(NamedTuple):
    """An attempt of a producer, and the user's step at it."""

    attempt: int
    step: int


NEVER: Final = Moment(-1, -1)


def moment_of(row: Any) -> Moment:
    """The moment of a row."""
    return Moment(int(row["attempt"]), int(row["step"]))
