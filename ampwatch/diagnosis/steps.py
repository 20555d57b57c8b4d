"""The steps of attempts whose rows are not held any longer: exact, at a fraction of a byte an attempt."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK: Final = 1 << 13  # attempts that are packed together


class Steps:
    """Attempt, step and whether it was taken, in order. All mostly go up evenly, so their differences pack well."""

    def __init__(self) -> None:
        self._firsts: list[int] = []  # attempt that each block begins with
        self._packed: list[bytes] = []
        self._open: list[npt.NDArray[np.int64]] = []  # (3, n) each, until they fill a block

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Take in further rows with these three fields."""
        self._open.append(np.stack([rows[name].astype(np.int64) for name in ("attempt", "step", "taken")]))
        if sum(part.shape[1] for part in self._open) >= BLOCK:
            block = np.concatenate(self._open, axis=1)
            self._firsts.append(int(block[0, 0]))
            self._packed.append(zlib.compress(np.diff(block, axis=1, prepend=0).tobytes()))
            self._open = []

    def of(self, attempt: int) -> int:
        """The step of an attempt; after the newest before it, if it has none, and itself if none came before."""
        for part in reversed(self._open):
            if part[0, 0] <= attempt:
                return _step_in(part, attempt)
        at = bisect_right(self._firsts, attempt) - 1
        return attempt if at < 0 else _step_in(_unpacked(self._packed[at]), attempt)


def _unpacked(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(zlib.decompress(packed), np.int64).reshape(3, -1).cumsum(axis=1)


def _step_in(block: npt.NDArray[np.int64], attempt: int) -> int:
    at, step, taken = block[:, np.searchsorted(block[0], attempt, side="right") - 1].tolist()
    return int(step) + int(at < attempt and taken)
