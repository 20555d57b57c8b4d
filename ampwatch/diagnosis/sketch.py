"""A histogram of magnitudes that answers percentiles: 8 bins an octave, whatever the order values came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

BINS_PER_OCTAVE: Final = 8
_OCTAVES: Final = 280  # 2^-140 … 2^140, the ends clamped
_BINS: Final = BINS_PER_OCTAVE * _OCTAVES
_SIZE: Final = 2 * _BINS + 1

Reals = npt.NDArray[np.float64]


@dataclass(slots=True)
class Sketch:
    """Counts of finite values by sign and log2 magnitude; percentiles are right within 2^(1/16), 4.4 %."""

    _counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_SIZE, dtype=np.int64))
    _waiting: list[Reals] = field(
        default_factory=list
    )  # counted together, since a few cost as much as thousands

    def add(self, values: Reals) -> None:
        """Count values, of any shape; those that are not finite are left out."""
        self._waiting.append(values.copy())  # of a column, and not the table that it is one of
        if len(self._waiting) >= 256 or len(values) >= 256:
            self._count()

    def percentile(self, q: float, beside: Reals) -> float:
        """The q-th percentile (0–100) of what was counted together with `beside`; NaN where there is nothing."""
        self._count()
        counts = self._counts + _counts_of(beside)
        total = int(counts.sum())
        if total == 0:
            return float("nan")
        rank = int(np.ceil(q / 100 * total))
        return _value_of(int(np.searchsorted(np.cumsum(counts), max(rank, 1))))

    def _count(self) -> None:
        if self._waiting:
            self._counts += _counts_of(np.concatenate(self._waiting))
            self._waiting = []


def _counts_of(values: Reals) -> npt.NDArray[np.int64]:
    return np.bincount(_bin_of(values[np.isfinite(values)]), minlength=_SIZE)


def _bin_of(values: Reals) -> npt.NDArray[np.int64]:
    """Bins in the order of the values: negative ones descending in magnitude, zero, positive ones ascending."""
    with np.errstate(divide="ignore"):
        octave = np.log2(np.abs(values)) + _OCTAVES / 2
    index = np.clip(np.floor(octave * BINS_PER_OCTAVE), 0, _BINS - 1).astype(np.int64)
    return np.where(values == 0, _BINS, np.where(values > 0, _BINS + 1 + index, _BINS - 1 - index))


def _value_of(index: int) -> float:
    """The geometric middle of a bin."""
    if index == _BINS:
        return 0.0
    sign = 1 if index > _BINS else -1
    bin_ = index - _BINS - 1 if sign > 0 else _BINS - 1 - index
    return float(sign * 2.0 ** ((bin_ + 0.5) / BINS_PER_OCTAVE - _OCTAVES / 2))
