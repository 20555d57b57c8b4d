"""Main memory for numbers that are kept for a while: large ones have pages of their own.

The heap of a process gives back only what is free at its end. The statistics of each of the last attempts, thrown
away one by one between what everybody else allocates for a moment, would leave it with as many holes: of 1,000 tensors
20 MiB of them were counted. But pages that are new are zeroed by the system as they are first written, 1.5 µs each,
which for the rows of small tensors takes as long as to unscale them: a few that were let go of are kept for the next.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]

PAGES_FROM: Final = 1 << 17  # bytes: what an allocator of C gives pages of their own at first
MOST_KEPT: Final = 1 << 22  # bytes: larger ones go back to the system at once
_kept: Final = deque[Numbers](maxlen=4)  # its own operations are atomic: memory is let go of in any thread


class _Lease:
    """What all arrays over the same pages have as their base: it goes with the last of them."""

    def __init__(self, pages: Numbers) -> None:
        self._pages = pages

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._pages.__array_interface__

    def __del__(self, kept: deque[Numbers] = _kept, most: int = MOST_KEPT) -> None:  # also as Python ends
        if self._pages.nbytes <= most:
            kept.append(self._pages)


def empty(size: int) -> Numbers:
    """So many float64 of any value, (size,)."""
    length = 8 * size
    if length < PAGES_FROM or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(size)
    kept = _take(size)
    return np.asarray(_Lease(_new_pages(length) if kept is None else kept))


def _take(size: int) -> Numbers | None:
    for _ in range(len(_kept)):
        try:
            pages = _kept.pop()
        except IndexError:  # another thread took them
            return None
        if pages.size == size:
            return pages
        _kept.appendleft(pages)
    return None


def _new_pages(length: int) -> Numbers:
    """Which a forked child has its own of."""
    return np.frombuffer(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
