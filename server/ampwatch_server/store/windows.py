"""Windows: which attempts a chunk holds, and how many a point of each level covers.

    level   window (attempts)    a point of `attempts`    a point of `tensors`
    0       1,024                1 (the rows)             1 (the rows)
    1       16,384               16                       256
    2       262,144              256                      4,096
    …       × 16                 × 16                     × 16

Windows lie at fixed places, whatever arrived in whatever order: that makes the same rows end in the same chunks.
Tensors are recorded every 25 attempts by default, so a level of 16 attempts would save nothing.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 1024
FANOUT: Final = 16
TOP_LEVEL: Final = 6
MAX_ATTEMPT: Final = WINDOW * FANOUT**TOP_LEVEL  # 1.7e10: attempts beyond are refused

_FIRST_POINT: Final = {"attempts": 16, "tensors": 256}


def window_size(level: int) -> int:
    """Attempts that a chunk of this level covers."""
    return int(WINDOW * FANOUT**level)


def point_size(kind: str, level: int) -> int:
    """Attempts that a point of this kind and level covers."""
    return 1 if level == 0 else int(_FIRST_POINT[kind] * FANOUT ** (level - 1))


def floor_to(attempt: int, size: int) -> int:
    """Start of the window of `size` attempts in which an attempt lies."""
    return attempt - attempt % size


def level_for(kind: str, stride: float) -> int:
    """The coarsest level whose points are no longer than `stride` attempts; of tensors, than twice as many.

    Rows of tensors are the dearest to read: half of the points asked for are better than 500,000 rows for a screen.
    """
    level, longest = 0, stride * (2 if kind == "tensors" else 1)
    while level < TOP_LEVEL and point_size(kind, level + 1) <= longest:
        level += 1
    return level


def stride_for(kind: str, attempts: int, points: int, lowest: int = 0) -> tuple[int, int]:
    """Level, at least `lowest`, and the attempts that each point shall cover, so that about `points` cover `attempts`."""
    wanted = max(1.0, attempts / max(1, points))
    level = max(level_for(kind, wanted), lowest)
    unit = point_size(kind, level)
    return level, unit * max(1, round(wanted / unit))
