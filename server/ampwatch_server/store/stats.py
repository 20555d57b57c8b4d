"""What is read of a tensor: the statistics that were sent, and what follows from them (docs/numerics.md)."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ampwatch.diagnosis.underflow import lost_share
from ampwatch.records import Array, Table, missing
from ampwatch.stats.layout import FLOAT16_MAX


class Stat(NamedTuple):
    """A statistic of the heatmap: its unit, whether its largest value is the worst, and of which tensors it speaks."""

    unit: str
    worst: str
    float16_only: bool


STATS: Final[dict[str, Stat]] = {
    "lost_share": Stat("share of elements", "max", float16_only=True),
    "subnormal_share": Stat("share of elements", "max", float16_only=False),
    "zero_share": Stat("share of elements", "max", float16_only=False),
    "headroom_log2": Stat("log2", "min", float16_only=True),
    "norm": Stat("L2 norm", "max", float16_only=False),
    "nonfinite": Stat("elements", "max", float16_only=False),
}
RAW: Final = ("scale", "max_abs", "numel", "n_inf", "n_nan", "n_zero", "n_subnormal", "n_below")
NAMES: Final = (*STATS, *RAW)


def with_lost_share(rows: Table) -> Table:
    """The rows with the column `lost_share`: the one statistic that takes a fit, so it is stored beside the rows."""
    if "lost_share" in rows:
        return rows
    n = len(rows["attempt"])
    if "hist" not in rows or rows["hist"].ndim != 2:
        return rows | {"lost_share": missing(n)}
    return rows | {"lost_share": lost_share(rows["hist"], np.nan_to_num(_real(rows, "n_zero", n))).share}


def derived(rows: Table) -> Table:
    """The rows with the columns of `STATS` beside those that were sent.

    A column that was not sent, and what follows from it, is missing. Norm and headroom are missing where an
    element is not finite: over the finite rest they mislead.
    """
    n = len(rows["attempt"])
    numel, inf, nan = (_real(rows, name, n) for name in ("numel", "n_inf", "n_nan"))
    nonfinite = _known(inf + nan)
    with np.errstate(all="ignore"):
        norm = np.sqrt(_real(rows, "sum_sq", n)) / _real(rows, "scale", n)
        headroom = np.log2(FLOAT16_MAX / _real(rows, "max_abs", n))
        shares = {
            f"{name}_share": _known(_real(rows, f"n_{name}", n) / numel) for name in ("subnormal", "zero")
        }
    unclear = nonfinite != 0
    return (
        with_lost_share(rows)
        | shares
        | {
            "nonfinite": nonfinite,
            "norm": _unless(unclear, _known(norm)),
            "headroom_log2": _unless(unclear | ~np.isfinite(headroom), headroom),
        }
    )


def _unless(hidden: Array, values: Array) -> Array:
    return np.where(hidden, missing(len(values)), values)


def _known(values: Array) -> Array:
    return _unless(np.isnan(values), values)


def _real(rows: Table, name: str, n: int) -> Array:
    return rows[name].astype(np.float64) if name in rows else missing(n)
