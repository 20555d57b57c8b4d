"""What is read of a tensor: the statistics that were sent, and what follows from them (docs/numerics.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import numpy as np

from ampwatch.diagnosis.underflow import shape_of, share_of, vanished
from ampwatch.records import MISSING, Array, Table, missing
from ampwatch.stats.layout import FLOAT16_MAX

from .points import real


class Stat(NamedTuple):
    """A statistic of the heatmap.

    Arguments:
        unit.
        worst: "max" where the largest value is the worst, else "min".
        float16_only: it speaks of float16-born tensors only.
        inputs: the columns of level 0 that it follows from.
    """

    unit: str
    worst: str
    float16_only: bool
    inputs: tuple[str, ...]


STATS: Final[dict[str, Stat]] = {
    "lost_share": Stat("share of elements", "max", True, ("lost_share",)),
    "subnormal_share": Stat("share of elements", "max", False, ("n_subnormal", "numel")),
    "zero_share": Stat("share of elements", "max", False, ("n_zero", "numel")),
    "headroom_log2": Stat("log2", "min", True, ("max_abs", "n_inf", "n_nan")),
    "norm": Stat("L2 norm", "max", False, ("sum_sq", "scale", "n_inf", "n_nan")),
    "nonfinite": Stat("elements", "max", False, ("n_inf", "n_nan")),
}
RAW: Final = ("scale", "max_abs", "numel", "n_inf", "n_nan", "n_zero", "n_subnormal", "n_below")
NAMES: Final = (*STATS, *RAW)


def fitted(rows: Table) -> Array | None:
    """The index of the distribution that is fitted to each row's histogram (`diagnosis.underflow`), in few bytes; None
    where there are none.
    """
    if "hist" not in rows or rows["hist"].ndim != 2:
        return None
    return shape_of(rows["hist"], _zeros(rows)).astype(np.int16)


def with_lost_share(rows: Table, shape: Array | None = None) -> Table:
    """The rows with the column `lost_share`: the one statistic that takes a fit, so it is stored beside the rows.

    Arguments:
        shape: `fitted` of these rows; None, or of fewer of them, where it is not known.
    """
    if shape is None or len(shape) != len(rows["attempt"]):
        shape = fitted(rows)
    if shape is None:
        return rows | {"lost_share": missing(len(rows["attempt"]))}
    n_zero = _zeros(rows)
    share = share_of(rows["hist"], n_zero, shape)
    share[vanished(rows["attempt"], rows["hist"], n_zero)] = 1.0
    return rows | {"lost_share": _single(share)}


def inputs_of(names: Collection[str]) -> set[str]:
    """The columns of level 0 that these statistics follow from."""
    return {column for name in names for column in (STATS[name].inputs if name in STATS else (name,))}


def derived(rows: Table, names: Collection[str]) -> Table:
    """The rows with those of `STATS` that are among `names` beside the columns that were sent.

    A column that was not sent, and what follows from it, is missing. Norm and headroom are missing where an
    element is not finite: over the finite rest they mislead. All but counts have the precision of the float32 that
    they were measured in.
    """
    with np.errstate(all="ignore"):
        return rows | {name: _DERIVED[name](rows) for name in names if name in _DERIVED}


def _zeros(rows: Table) -> Array:
    return np.nan_to_num(real(rows, "n_zero"))


def _nonfinite(rows: Table) -> Array:
    return _known(real(rows, "n_inf") + real(rows, "n_nan"))


def _norm(rows: Table) -> Array:
    norm = np.sqrt(real(rows, "sum_sq")) / real(rows, "scale")
    return _single(np.where(_nonfinite(rows) != 0, np.nan, norm))


def _headroom_log2(rows: Table) -> Array:
    headroom = np.log2(FLOAT16_MAX / real(rows, "max_abs"))
    return _single(np.where((_nonfinite(rows) != 0) | np.isinf(headroom), np.nan, headroom))


def _share(name: str) -> Callable[[Table], Array]:
    return lambda rows: _known(real(rows, name) / real(rows, "numel"))


_DERIVED: Final[dict[str, Callable[[Table], Array]]] = {
    "subnormal_share": _share("n_subnormal"),
    "zero_share": _share("n_zero"),
    "headroom_log2": _headroom_log2,
    "norm": _norm,
    "nonfinite": _nonfinite,
}


def _single(values: Array) -> Array:
    """Rounded to float32, where they lie in its range."""
    rounded = values.astype(np.float32).astype(np.float64)
    return _known(np.where(np.isinf(rounded), values, rounded))


def _known(values: Array) -> Array:
    """A statistic can be missing, but not NaN."""
    return np.where(np.isnan(values), MISSING, values)
