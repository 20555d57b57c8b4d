"""Main memory for numbers that are kept for a while: large ones have pages of their own.

The heap of a process gives back only what is free at its end. The statistics of each of the last attempts, thrown
away one by one between what everybody else allocates for a moment, would leave it with as many holes: of 1,000 tensors
20 MiB of them were counted.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

PAGES_FROM: Final = 1 << 17  # bytes: what an allocator of C gives pages of their own at first


def empty(size: int) -> npt.NDArray[np.float64]:
    """So many float64 of any value, (size,)."""
    length = 8 * size
    if length < PAGES_FROM or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(size)
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child has its own
    return np.frombuffer(pages)
