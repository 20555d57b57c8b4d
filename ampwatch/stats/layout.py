"""Names and places of the statistics of one gradient tensor (docs/numerics.md).

A statistics pass fills, for every tensor, one row of `WIDTH` float64 values: the `SCALARS` in this order,
then the `HIST_BINS` counts of the histogram. Counts are exact in float64 up to 2^53 elements.
Bin b of the histogram counts the elements with 2^(b - 48) <= |s| < 2^(b - 47), the ends clamped; zeros,
infinities and NaN are not counted.
"""

from __future__ import annotations

SCALARS = (
    "numel",
    "n_inf",
    "n_nan",
    "n_zero",
    "n_subnormal",
    "n_below",
    "n_offgrid",
    "n_offgrid_bf16",
    "max_abs",
    "sum_sq",
)
HIST_BINS = 64
HIST_LOG2_MIN = -48  # bin 0 starts at 2^-48
WIDTH = len(SCALARS) + HIST_BINS

FLOAT16_MAX = 65504.0
FLOAT16_MIN_NORMAL = 2.0**-14
FLOAT16_MIN_SUBNORMAL = 2.0**-24
FLOAT16_ROUNDS_TO_ZERO = 2.0**-25  # values at or below it become 0 (round to nearest, ties to even)
