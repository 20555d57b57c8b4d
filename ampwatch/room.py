"""Room: how much a producer may still write, so that what is recorded never fills a disk."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

MIN_FREE_BYTES: Final = 10 << 30
MIN_FREE_SHARE: Final = 0.05
MEASURE_S: Final = 60.0  # other ranks write into the same folder
MEASURE_SHARE: Final = (
    0.01  # of the time at most is spent on measuring: a folder of a thousand ranks takes long
)


class Usage(Protocol):
    """What is wanted of `shutil.disk_usage`: bytes of a file system."""

    @property
    def total(self) -> int:
        """Its size; 0 where the file system does not say."""

    @property
    def free(self) -> int:
        """What an ordinary user may still write."""


class Left(NamedTuple):
    """Bytes that may still be written, below 0 where it is too much already, and the setting that bounds them."""

    bytes: float
    bound: str


class Room:
    """What is left below a folder of runs: of the bound on all of them, and above what must stay free.

    Arguments:
        directory: the folder of all runs.
        max_bytes: bound of all segments below it.
        min_free_bytes: what stays free on the file system; None is the larger of `MIN_FREE_BYTES` and
            `MIN_FREE_SHARE` of it, and 0 is no such bound.
        usage: bytes of the file system of a path.
        clock: monotonic, in seconds. The folder is measured when room is short, and every `MEASURE_S`; where that
            takes long, less often.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        min_free_bytes: int | None = None,
        *,
        usage: Callable[[Path], Usage] = shutil.disk_usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._max_bytes, self._min_free_bytes = directory, max_bytes, min_free_bytes
        self._usage, self._clock = usage, clock
        self._left = 0
        self._measured = -math.inf
        self._took_s = 0.0

    def left(self, needed_bytes: int) -> Left:
        """What is left, for who wants to write so much."""
        since_s = self._clock() - self._measured
        is_wanted = needed_bytes > self._left or since_s >= MEASURE_S
        if is_wanted and since_s * MEASURE_SHARE >= self._took_s:
            self._measure()
        bound = Left(self._left, "spool_max_bytes")
        floor = Left(self._above_floor(), "spool_min_free_bytes")
        return min(bound, floor)

    def take(self, size_bytes: int) -> None:
        """So much has been written; below 0, deleted."""
        self._left -= size_bytes

    def _measure(self) -> None:
        begun = self._clock()
        self._left = self._max_bytes - size_of(self._directory)
        self._measured = self._clock()
        self._took_s = self._measured - begun

    def _above_floor(self) -> float:
        if self._min_free_bytes == 0:
            return math.inf
        try:
            usage = self._usage(self._directory)
        except OSError:
            return math.inf
        if not usage.total:
            return math.inf
        default = max(MIN_FREE_BYTES, int(MIN_FREE_SHARE * usage.total))
        return usage.free - (default if self._min_free_bytes is None else self._min_free_bytes)


def size_of(directory: Path) -> int:
    """Bytes of everything that producers keep below the folder of all runs."""
    total = 0
    for pattern in ("*/*/*.awb", "*/*/*/*.awb"):  # segments; what was refused or cut
        for path in directory.glob(pattern):
            try:
                total += path.stat().st_size
            except FileNotFoundError:  # its owner dropped it meanwhile
                continue
    return total
