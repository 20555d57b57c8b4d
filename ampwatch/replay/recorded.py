"""What a replay needs of a recorded run: the attempts of one scaler, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.records import is_missing, missing

Reals = npt.NDArray[np.float64]
COLUMNS: Final = (
    "attempt",
    "scale",
    "scale_after",
    "found_inf",
    "loss",
    "headroom_log2",
    "micro_batches",
    "losses",
)


class Attempts(NamedTuple):
    """Attempts in order, each an array of shape (n,).

    Arguments:
        attempt: their numbers, increasing; int64.
        scale: the loss scale of each; float64.
        scale_after: what it left behind; float64, `scale` where that is not known.
        overflow: whether inf or NaN was met; bool.
        loss_finite: whether the loss was finite, or is not known; bool.
        headroom_log2: log2(65504 / largest float16-born |scaled gradient|), binades; NaN where it says nothing of the
            scale: not known, overflow, accumulation or averaging over ranks (docs/numerics.md, section 4).
    """

    attempt: npt.NDArray[np.int64]
    scale: Reals
    scale_after: Reals
    overflow: npt.NDArray[np.bool_]
    loss_finite: npt.NDArray[np.bool_]
    headroom_log2: Reals

    @property
    def n(self) -> int:
        """How many."""
        return self.attempt.size


def attempts_of(tables: Iterable[Mapping[str, npt.NDArray[Any]]], *, averaged: bool = False) -> Attempts:
    """The attempts of `attempts` tables, in any order; a repeated attempt counts once.

    Arguments:
        tables: with columns `attempt`, `scale`, and those of `COLUMNS` that there are.
        averaged: gradients are summed over ranks, so that their magnitude bounds no scale.
    """
    found = [_columns(table) for table in tables if len(table["attempt"])]
    if not found:
        nothing = np.zeros(0)
        return Attempts(
            nothing.astype(np.int64), nothing, nothing, nothing.astype(bool), nothing.astype(bool), nothing
        )
    joined = {name: np.concatenate([table[name] for table in found]) for name in COLUMNS}
    attempt, first = np.unique(joined["attempt"].astype(np.int64), return_index=True)
    its = {name: column[first] for name, column in joined.items()}
    overflow, loss = its["found_inf"] > 0, its["loss"]
    alone = (its["micro_batches"] <= 1) & (its["losses"] <= 1) & ~overflow & (not averaged)
    headroom = np.where(alone, its["headroom_log2"], np.nan)
    after = np.where(is_missing(its["scale_after"]), its["scale"], its["scale_after"])
    return Attempts(attempt, its["scale"], after, overflow, np.isfinite(loss) | is_missing(loss), headroom)


def _columns(table: Mapping[str, npt.NDArray[Any]]) -> dict[str, Reals]:
    n = len(table["attempt"])
    absent = {"found_inf": 0.0, "micro_batches": -1.0, "losses": 1.0}
    return {
        name: np.asarray(table[name], dtype=np.float64)
        if name in table
        else (np.full(n, absent[name]) if name in absent else missing(n))
        for name in COLUMNS
    }
