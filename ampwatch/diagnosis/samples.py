"""The tensor rows of one producer, reduced to what the rules ask, and thinned with age.

Of the sampled attempts are kept, for every j, the newest 32 whose number 2^j divides: all of the newest, and
older ones ever more apart, as many as the logarithm of the run. Where memory is bounded and the rows of so many
would not fit into it, they are 16, 8, 4, 2 or 1. Which they are depends on the set of attempts alone, not on the order
they came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.records import Table, missing
from ampwatch.stats.layout import HIST_BINS

from .rows import runs_of
from .underflow import lost_share

NEWEST: Final = 32
UNFITTED_BYTES: Final = 8 << 20  # of rows that are held with their histograms
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


class _Part(NamedTuple):
    """Rows of one attempt, and the histograms that are fitted once somebody asks: those bins in which something is.

    Counts take as few bytes as the largest of them needs. Where the shape is known it stands in the rows.
    """

    rows: npt.NDArray[Any]
    bins: npt.NDArray[np.intp]
    counts: npt.NDArray[Any]  # (rows, bins)
    has_shape: bool

    @classmethod
    def of(cls, rows: npt.NDArray[Any], hist: npt.NDArray[np.int64], *, has_shape: bool) -> _Part:
        """Copies: an attempt that is kept would hold the table of a whole flush, all columns of it."""
        bins = np.flatnonzero(hist.any(axis=0))
        counts = hist[:, bins].astype(np.min_scalar_type(hist.max(initial=0)))
        return cls(rows.copy(), bins, counts, has_shape)

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self.rows.nbytes + self.counts.nbytes

    def fitted(self) -> npt.NDArray[Any]:
        """The rows with what their histograms say of the lost."""
        hist = np.zeros((len(self.rows), HIST_BINS), dtype=np.int64)
        hist[:, self.bins] = self.counts
        shape = self.rows["shape"] if self.has_shape else None
        estimate = lost_share(hist, self.rows["n_zero"], shape)
        for name in ("lost", "norm_share", "shape"):
            self.rows[name] = getattr(estimate, name)
        return self.rows


class Samples:
    """Tensor statistics of sampled attempts: `add` tables in any order, read them in the order of the attempts.

    A fit is the dearest of all that is done with a row, so only those are fitted that are read: most attempts of a
    backlog are thinned out before.

    Arguments:
        most_bytes: of the rows that are kept, and half as many of those that are not fitted yet; None: no bound.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._most_unfitted = UNFITTED_BYTES if most_bytes is None else most_bytes // 2
        self._tensors = self._attempts = 0  # so many at most, by the largest numbers seen
        self._at: dict[int, list[npt.NDArray[Any]]] = {}
        self._unfitted: dict[int, list[_Part]] = {}
        self._limit = 8 * NEWEST

    def add(self, table: Table) -> None:
        """Take in a `tensors` table; with a column `shape` where its histograms were fitted before."""
        if (np.diff(table["attempt"]) < 0).any():  # as from the store, where each tensor's rows lie together
            order = np.argsort(table["attempt"], kind="stable")
            table = {name: column[order] for name, column in table.items()}
        attempts, reduced, hist = table["attempt"], _reduce(table), _histograms(table)
        self._tensors = max(self._tensors, int(reduced["tensor"].max(initial=-1)) + 1)
        self._attempts = max(self._attempts, int(attempts.max(initial=-1)) + 1)
        for start, stop in runs_of(attempts):
            part = _Part.of(reduced[start:stop], hist[start:stop], has_shape="shape" in table)
            self._unfitted.setdefault(int(attempts[start]), []).append(part)
        if self._unfitted_bytes() > self._most_unfitted:
            self._thin()
        if self._unfitted_bytes() > self._most_unfitted:
            self._fit()
        if len(self._at) > self._limit:
            self._thin()
            self._limit = max(self._limit, 2 * len(self._at))

    def __iter__(self) -> Iterator[Sample]:
        self._fit()
        for attempt in sorted(self._at):
            parts = self._at[attempt]
            tensors = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if (np.diff(tensors["tensor"]) < 0).any():
                tensors = tensors[np.argsort(tensors["tensor"], kind="stable")]
            yield Sample(attempt, tensors)

    def _unfitted_bytes(self) -> int:
        return sum(part.nbytes for parts in self._unfitted.values() for part in parts)

    def _fit(self) -> None:
        """Fit what came since, but for the attempts that are thinned out."""
        if not self._unfitted:
            return
        self._thin()
        found = [(attempt, part) for attempt, parts in self._unfitted.items() for part in parts]
        self._unfitted = {}
        for attempt, part in found:
            self._at.setdefault(attempt, []).append(part.fitted())

    def _thin(self) -> None:
        newest = NEWEST
        if self._most_bytes is not None:
            newest = newest_within(self._most_bytes, self._tensors, self._attempts)
        there = {*self._at, *self._unfitted}
        for attempt in there - kept_of(there, newest):
            self._at.pop(attempt, None)
            self._unfitted.pop(attempt, None)


def kept_of(attempts: set[int], newest: int = NEWEST) -> set[int]:
    """Of sampled attempts those whose rows are kept. What is left out here is left out of any larger set too.

    Arguments:
        newest: kept of those whose number 2^j divides. What fewer leave, more leave too.
    """
    newest_first = np.array(sorted(attempts, reverse=True), dtype=np.int64)
    kept: set[int] = set()
    for level in range(_LEVELS):
        kept.update(newest_first[newest_first % 2**level == 0][:newest].tolist())
    return kept


def newest_within(most_bytes: int, tensors: int, attempts: int) -> int:
    """How many are kept of those whose number 2^j divides, so that all take no more bytes; at least one.

    Arguments:
        tensors: of an attempt.
        attempts: of the run, of which each may be sampled.
    """
    newest = NEWEST
    while newest > 1 and SAMPLE.itemsize * tensors * _kept(attempts, newest) > most_bytes:
        newest //= 2
    return newest


def kept_bytes(attempts: int, rows: int) -> int:
    """What is kept of so many rows of sampled attempts, in bytes, about."""
    return round(SAMPLE.itemsize * rows * min(1.0, _kept(attempts, NEWEST) / max(1, attempts)))


def _kept(attempts: int, newest: int) -> float:
    """How many of so many sampled attempts are kept, about."""
    return newest * (1 + 0.5 * math.log2(max(1.0, attempts / newest)))


def _reduce(table: Table) -> npt.NDArray[Any]:
    rows = np.zeros(len(table["attempt"]), dtype=SAMPLE)
    for name in ("stream", "tensor", "scale", "numel", "n_zero", "shape"):
        rows[name] = table.get(name, 0)
    rows["n_bad"] = np.asarray(table.get("n_inf", 0)) + np.asarray(table.get("n_nan", 0))
    rows["max_abs"] = table.get("max_abs", missing(len(rows)))
    return rows


def _histograms(table: Table) -> npt.NDArray[Any]:
    return table.get("hist", np.zeros((len(table["attempt"]), HIST_BINS), dtype=np.int64))
