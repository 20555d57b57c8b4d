"""The share of gradient elements that other scales would have lost to underflow, at sampled attempts of a recorded run.

At a smaller scale what is lost more can be read off the histograms, exact to one bin; what was lost already, and what
a larger scale would bring back, is the estimate of `diagnosis.underflow`. Over float16-born tensors only, so that each
share is a lower bound for all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.diagnosis.underflow import lost_share, lost_share_at, share_at, vanished

from .ceiling import nearest
from .recorded import Reals

SAMPLES: Final = 24
_SHIFTS: Final = np.arange(-48, 33)  # binades from the recorded scale to another


class Losses(NamedTuple):
    """At sampled attempts, the share that each scale would lose.

    Arguments:
        attempt: int64, (m,).
        scale: the recorded scale, (m,).
        share: (m, 81), at scale × 2^k for k from -48 to 32; in [0, 1].
    """

    attempt: npt.NDArray[np.int64]
    scale: Reals
    share: Reals

    def at(self, scales: Reals) -> Reals:
        """The share lost at each sampled attempt, had its scale been this one; (m,), and so is `scales`."""
        with np.errstate(divide="ignore"):
            shift = np.log2(scales) - np.log2(self.scale)
        place = np.clip(shift - _SHIFTS[0], 0, len(_SHIFTS) - 1)
        low = np.minimum(place.astype(np.int64), len(_SHIFTS) - 2)
        row = np.arange(len(self.share))
        part = place - low
        found: Reals = (1 - part) * self.share[row, low] + part * self.share[row, low + 1]
        return found


NOTHING: Final = Losses(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, len(_SHIFTS))))


def losses_of(tables: Iterable[Mapping[str, npt.NDArray[Any]]], born: Iterable[int]) -> Losses:
    """The losses at no more than 24 attempts, evenly spread over the run, of those that `tensors` tables hold.

    Arguments:
        tables: with columns `attempt`, `tensor`, `scale`, `n_zero`, `hist`, and `n_inf` and `n_nan` where there are.
        born: ids of the tensors whose gradients are float16-born.
    """
    kept = [_usable(table, born) for table in tables if "hist" in table]
    rows = {name: np.concatenate([table[name] for table in kept]) for name in kept[0]} if kept else {}
    if not rows or not len(rows["attempt"]):
        return NOTHING
    inside = np.isin(rows["attempt"], spread(np.unique(rows["attempt"]), SAMPLES))
    return _losses({name: column[inside] for name, column in rows.items()})


def spread(attempts: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """At most so many of some attempts, (n,) ascending: those nearest to equal distances between the first and the last.

    Not every n-th of them: at a run's start and around its trouble recorded attempts stand closer.
    """
    return np.unique(nearest(attempts, np.linspace(attempts[0], attempts[-1], most)))


def _usable(table: Mapping[str, npt.NDArray[Any]], born: Iterable[int]) -> dict[str, npt.NDArray[Any]]:
    bad = np.asarray(table.get("n_inf", 0)) + np.asarray(table.get("n_nan", 0))
    good = np.isin(table["tensor"], list(born)) & (bad == 0) & (table["scale"] > 0)
    gone = vanished(table["attempt"], table["hist"], table["n_zero"])
    kept = {name: table[name] for name in ("attempt", "scale", "n_zero", "hist")} | {"vanished": gone}
    return {name: column[good] for name, column in kept.items()}


def _losses(rows: Mapping[str, npt.NDArray[Any]]) -> Losses:
    attempt, first, row = np.unique(rows["attempt"], return_index=True, return_inverse=True)
    seen = rows["hist"].sum(axis=1).astype(np.float64)
    estimate = lost_share(rows["hist"], rows["n_zero"])
    gone = np.where(rows["vanished"], rows["n_zero"], estimate.lost)
    total = seen + gone
    lost = np.stack([_lost(rows, seen, total, gone, estimate.shape, int(k)) for k in _SHIFTS], axis=1)
    sums = np.zeros((len(attempt), len(_SHIFTS)))
    np.add.at(sums, row, lost)
    of = np.bincount(row, total, len(attempt))[:, None]
    return Losses(attempt, rows["scale"][first], np.divide(sums, of, out=np.zeros_like(sums), where=of > 0))


def _lost(
    rows: Mapping[str, npt.NDArray[Any]],
    seen: Reals,
    total: Reals,
    lost: Reals,
    shape: npt.NDArray[np.int64],
    shift: int,
) -> Reals:
    """Elements of each row that a scale 2^shift times the recorded one would lose."""
    if shift <= 0:
        return lost + seen * lost_share_at(rows["hist"], -shift)
    return np.minimum(lost, total * share_at(shape, shift))
