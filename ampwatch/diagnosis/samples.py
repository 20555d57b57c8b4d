"""The tensor rows of one producer, reduced to what the rules ask, and thinned with age.

Of the sampled attempts are kept, for every j, the newest 32 whose number 2^j divides: all of the newest, and
older ones ever more apart, as many as the logarithm of the run. Which they are depends on the set of attempts
alone, not on the order they came in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.records import Table, missing
from ampwatch.stats.layout import HIST_BINS

from .underflow import lost_share

NEWEST: Final = 32
_LEVELS: Final = 40

SAMPLE: Final = np.dtype(
    [
        ("stream", "<i4"),
        ("tensor", "<i4"),
        ("shape", "<i4"),  # of the fitted distribution, -1: none
        ("scale", "<f8"),
        ("numel", "<i8"),
        ("n_bad", "<i8"),
        ("n_zero", "<i8"),
        ("max_abs", "<f8"),
        ("lost", "<f8"),  # elements, estimated
        ("norm_share", "<f8"),
    ]
)


class Sample(NamedTuple):
    """The tensors recorded at one attempt, an array of `SAMPLE`."""

    attempt: int
    tensors: npt.NDArray[Any]


class Samples:
    """Tensor statistics of sampled attempts: `add` tables in any order, read them in the order of the attempts."""

    def __init__(self) -> None:
        self._at: dict[int, list[npt.NDArray[Any]]] = {}
        self._limit = 8 * NEWEST

    def add(self, table: Table) -> None:
        """Take in a `tensors` table."""
        attempts = table["attempt"]
        reduced = _reduce(table)
        for attempt in np.unique(attempts).tolist():
            self._at.setdefault(attempt, []).append(reduced[attempts == attempt])
        if len(self._at) > self._limit:
            self._thin()
            self._limit = max(self._limit, 2 * len(self._at))

    def __iter__(self) -> Iterator[Sample]:
        self._thin()
        for attempt in sorted(self._at):
            parts = self._at[attempt]
            tensors = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield Sample(attempt, tensors[np.argsort(tensors["tensor"], kind="stable")])

    def _thin(self) -> None:
        attempts = np.array(sorted(self._at, reverse=True), dtype=np.int64)
        kept: set[int] = set()
        for level in range(_LEVELS):
            kept.update(attempts[attempts % 2**level == 0][:NEWEST].tolist())
        for attempt in set(self._at) - kept:
            del self._at[attempt]


def _reduce(table: Table) -> npt.NDArray[Any]:
    rows = np.zeros(len(table["attempt"]), dtype=SAMPLE)
    for name in ("stream", "tensor", "scale", "numel", "n_zero"):
        rows[name] = table.get(name, 0)
    rows["n_bad"] = np.asarray(table.get("n_inf", 0)) + np.asarray(table.get("n_nan", 0))
    rows["max_abs"] = table.get("max_abs", missing(len(rows)))
    hist = table.get("hist", np.zeros((len(rows), HIST_BINS), dtype=np.int64))
    estimate = lost_share(hist, rows["n_zero"])
    rows["lost"], rows["norm_share"], rows["shape"] = estimate.lost, estimate.norm_share, estimate.shape
    return rows
