"""How much of a float16 gradient was lost to underflow, from what is left of it (docs/numerics.md, section 5).

A float16-born element whose scaled magnitude is at or below 2^-25 became zero. The histogram shows the others,
so the shape of the distribution is fitted to them, as one fits a sample that is censored from below, and the
part of the fitted distribution under the limit is the estimate. A zero is never evidence of underflow by
itself, only a bound: no more than `n_zero` elements can have been lost.

The family is the logarithm of a generalised gamma, density ∝ exp(l·t - (l/r)·e^(r·t)) with t = ln 2 · (y - m) and
y = log2 |s|: a left tail that falls by l binades per binade (1 for any density that is smooth at zero, less for
mixtures of scales) and a right tail that bends down. The three parameters run over a fixed grid, so that a
fit of thousands of tensors is one matrix product.

What it cannot see: elements that are zero because a whole row of the *activation* gradient was lost upstream
leave no trace in the histogram. The estimate is then a lower bound, `n_zero` an upper one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ampwatch.stats.layout import HIST_BINS, HIST_LOG2_MIN

LIMIT_LOG2: Final = -25.0  # at or below it an element rounds to zero
MIN_ELEMENTS: Final = 64  # seen elements below which no shape is fitted
FIRST_BIN: Final = -24 - HIST_LOG2_MIN  # the bin of the smallest subnormal
NEAR_BINS: Final = 10  # binades above the limit that must hold …
NEAR_SHARE: Final = 1e-3  # … this share of the elements, or next to nothing (6e-4 at most) can lie below it
_FINE: Final = np.arange(-60.0, 17.0, 0.125)  # log2 grid of the fitted densities
_CHUNK: Final = 256
_PART: Final = 60  # shapes that are made at once

Reals = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """Elements and gradient lost to underflow, each an array of the leading shape of the histograms.

    Arguments:
        lost: estimated number of elements that became zero, at least; float64.
        bound: no more than so many elements can have been lost: `n_zero`; float64.
        share: lost / (lost + elements that are not zero), in [0, 1]; 0 where there is nothing to judge.
        bound_share: bound / (bound + elements that are not zero), in [0, 1].
        norm_share: L2 norm of the lost elements / L2 norm of all, in [0, 1]; a loose lower bound, since what was
            lost upstream may have been large (docs/faults/underflow.md).
        shape: index of the fitted distribution, for `share_at`; -1 where none was fitted.
    """

    lost: Reals
    bound: Reals
    share: Reals
    bound_share: Reals
    norm_share: Reals
    shape: npt.NDArray[np.int64]


def lost_share(hist: npt.ArrayLike, n_zero: npt.ArrayLike, shape: npt.NDArray[Any] | None = None) -> Estimate:
    """Estimate what underflow took from tensors whose gradients are float16-born.

    Arguments:
        hist: (…, 64) counts, as in `stats.layout`, of the *scaled* gradient.
        n_zero: (…) exact zeros.
        shape: (…) `shape_of` these, where it is known: to find it is most of the work.

    Where fewer than 64 elements are not zero, no shape is fitted: the estimate is 0 and the bound says the rest.
    """
    counts, zeros = np.asarray(hist), np.asarray(n_zero, dtype=np.float64)
    flat, flat_zeros = counts.reshape(-1, HIST_BINS), zeros.reshape(-1)
    shape = shape_of(flat, flat_zeros) if shape is None else shape.reshape(-1)
    lost, seen = _lost(flat, flat_zeros, shape)
    norm = _norm_share(flat.astype(np.float64), lost, shape)
    parts = (lost, flat_zeros, _share(lost, seen), _share(flat_zeros, seen), norm, shape)
    return Estimate(*(cast("Reals", part.reshape(zeros.shape)) for part in parts))  # type: ignore[arg-type]


def shape_of(hist: npt.NDArray[Any], n_zero: Reals) -> npt.NDArray[np.int64]:
    """`Estimate.shape` alone. Arguments: (n, 64) and (n,), as of `lost_share`."""
    seen = hist.sum(axis=1).astype(np.float64)
    shape = np.full(len(hist), -1, dtype=np.int64)
    near = hist[:, FIRST_BIN : FIRST_BIN + NEAR_BINS].sum(axis=1)
    fitted = np.flatnonzero((n_zero > 0) & (seen >= MIN_ELEMENTS) & (near >= NEAR_SHARE * seen))
    fitted = fitted[
        np.argsort(n_zero[fitted] / seen[fitted], kind="stable")
    ]  # alike: few shapes and bins each
    for start in range(0, len(fitted), _CHUNK):
        rows = fitted[start : start + _CHUNK]
        shape[rows] = _fit(hist[rows, FIRST_BIN:], seen[rows], n_zero[rows])
    return shape


def share_of(hist: npt.NDArray[Any], n_zero: Reals, shape: npt.NDArray[Any]) -> Reals:
    """`Estimate.share` alone, which costs half. Arguments: (n, 64), (n,) and (n,), as of `lost_share`."""
    return _share(*_lost(hist, n_zero, shape))


def vanished(attempt: npt.ArrayLike, hist: npt.ArrayLike, n_zero: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Rows of tensors that are all zero at an attempt at which another is not: of float16-born ones all is lost.

    Arguments:
        attempt, n_zero: (n,) of every tensor of each attempt.
        hist: (n, 64) counts.
    """
    seen = np.asarray(hist).sum(axis=1) > 0
    attempts = np.asarray(attempt)
    found: npt.NDArray[np.bool_] = ~seen & (np.asarray(n_zero) > 0) & np.isin(attempts, attempts[seen])
    return found


def lost_share_at(hist: npt.ArrayLike, shift_log2: float) -> Reals:
    """The share of the elements seen now that a scale 2^shift_log2 times smaller would lose; exact up to one bin.

    Arguments:
        hist: (…, 64) counts of the scaled gradient.
        shift_log2: k ≥ 0: the scale would be divided by 2^k.
    """
    counts = np.asarray(hist, dtype=np.float64)
    seen = counts.sum(axis=-1)
    below = np.clip(LIMIT_LOG2 + shift_log2 - HIST_LOG2_MIN, 0, HIST_BINS)
    whole = int(below)
    lost = counts[..., :whole].sum(axis=-1)
    if whole < HIST_BINS:
        lost = lost + counts[..., whole] * (below - whole)
    return cast("Reals", np.divide(lost, seen, out=np.zeros_like(seen), where=seen > 0))


def share_at(shape: npt.NDArray[np.int64], raise_log2: float) -> Reals:
    """The share that a fitted distribution would lose at a scale 2^raise_log2 times larger; 0 without a fit.

    Arguments:
        shape: `Estimate.shape`.
    """
    shapes = _shapes()
    column = np.searchsorted(_FINE, LIMIT_LOG2 - raise_log2) - 1
    return np.where(shape >= 0, shapes.lost_at[shape, max(int(column), 0)].astype(np.float64), 0.0)


class _Shapes(NamedTuple):
    """The grid: log-probability of each visible bin given that an element is visible, and what lies below."""

    log_visible: npt.NDArray[np.float32]  # (visible bins, shapes)
    odds: Reals  # (shapes,) lost elements for each visible one, ascending
    square: Reals  # (shapes,) mean of s² over the lost elements
    lost_at: npt.NDArray[np.float32]  # (shapes, fine grid below the limit) lost at a limit there


@cache
def _shapes() -> _Shapes:
    axes = np.meshgrid(
        np.arange(-45.0, 8.0, 0.5), [0.15, 0.25, 0.35, 0.5, 0.7, 1.0], [0.15, 0.25, 0.4, 0.7, 1.2]
    )
    grid = np.stack([axis.ravel() for axis in axes])
    # In parts, as the whole would leave 60 MiB of temporaries with the training process.
    parts = [_shapes_of(*grid[:, start : start + _PART]) for start in range(0, grid.shape[1], _PART)]
    log_visible, odds, square, lost_at = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(odds, kind="stable")
    return _Shapes(np.ascontiguousarray(log_visible[order].T), odds[order], square[order], lost_at[order])


def _shapes_of(mode: Reals, left: Reals, right: Reals) -> tuple[npt.NDArray[Any], ...]:
    """What `_Shapes` holds of some of the grid, one row each, in its order."""
    mode, left, right = mode[:, None], left[:, None], right[:, None]
    t = np.log(2) * (_FINE - mode)
    with np.errstate(over="ignore"):
        log_density = left * t - left / right * np.exp(right * t)
    density = np.exp(log_density - log_density.max(axis=1, keepdims=True))
    density /= density.sum(axis=1, keepdims=True)
    cumulative = np.cumsum(density, axis=1)
    at_edges = cumulative[:, np.searchsorted(_FINE, _true_edges()) - 1]
    at_edges[:, -1] = 1.0
    lost = at_edges[:, 0]
    visible = np.clip(np.diff(at_edges, axis=1), 1e-12, None)
    below = _FINE <= LIMIT_LOG2
    square = (density[:, below] * 4.0 ** _FINE[below]).sum(axis=1) / np.clip(lost, 1e-12, None)
    log_visible = np.log(visible / visible.sum(axis=1, keepdims=True))
    odds = lost / np.clip(1 - lost, 1e-12, None)
    lost_at = cumulative[:, : np.searchsorted(_FINE, LIMIT_LOG2)]
    return log_visible.astype(np.float32), odds, square, lost_at.astype(np.float32)


def _true_edges() -> Reals:
    """log2 of the true magnitudes that round into each visible bin, as edges.

    Subnormals are whole multiples of 2^-24, so that the bin [2^k, 2^(k+1)) holds the true magnitudes from
    2^k - 2^-25 to 2^(k+1) - 2^-25; from 2^-17 on that no longer shows.
    """
    edges = 2.0 ** np.arange(-24.0, HIST_LOG2_MIN + HIST_BINS + 1)
    return cast("Reals", np.log2(edges - 2.0**-25))


def _lost(counts: npt.NDArray[Any], zeros: Reals, shape: npt.NDArray[Any]) -> tuple[Reals, Reals]:
    """Of each row the elements that were lost, and those that are seen."""
    seen = counts.sum(axis=1).astype(np.float64)
    return np.where(shape >= 0, np.minimum(seen * _shapes().odds[shape], zeros), 0.0), seen


def _fit(visible: npt.NDArray[Any], seen: Reals, zeros: Reals) -> npt.NDArray[np.int64]:
    """Index of the likeliest shape of each row among those that lose no more than its zeros; -1 where none does."""
    shapes = _shapes()
    admitted = np.searchsorted(shapes.odds, zeros / seen, side="right")
    bins = np.flatnonzero(visible.any(axis=0))
    used, most = slice(bins[0], bins[-1] + 1), admitted.max()
    shares = (visible[:, used] / seen[:, None]).astype(np.float32)
    likelihood = shares @ shapes.log_visible[used, :most]  # of one element
    best = likelihood.argmax(axis=1) if most else np.full(len(seen), -1)
    for i in np.flatnonzero(best >= admitted).tolist():  # the likeliest is not admitted
        best[i] = likelihood[i, : admitted[i]].argmax() if admitted[i] else -1
    return best


def _norm_share(counts: Reals, lost: Reals, shape: npt.NDArray[np.int64]) -> Reals:
    middles = 4.0 ** (HIST_LOG2_MIN + np.arange(HIST_BINS) + 0.5)
    kept = counts @ middles
    gone = np.where(shape >= 0, lost * _shapes().square[shape], 0.0)
    total = kept + gone
    return cast("Reals", np.sqrt(np.divide(gone, total, out=np.zeros_like(total), where=total > 0)))


def _share(lost: Reals, seen: Reals) -> Reals:
    total = lost + seen
    return cast("Reals", np.divide(lost, total, out=np.zeros_like(total), where=total > 0))
