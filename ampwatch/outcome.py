"""One attempt: what the host knows of it, what its numbers say, and what follows from the two. Pure, torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .logbook import Entry
from .records import MISSING
from .stats.layout import FLOAT16_MAX, SCALARS

Numbers: TypeAlias = npt.NDArray[np.float64]

NAMED: Final = 16  # tensors that an event lists
MOST_OPTIMIZERS: Final = 8  # that have columns of their own; a batch may have 256, and log() adds up to 128
MOST_RATES: Final = (
    32  # learning rates of the first of them; of the second half as many, of the third a third
)
AT: Final = {name: i for i, name in enumerate(SCALARS)}
_COUNTS: Final = ("numel", "n_inf", "n_nan", "n_zero", "n_subnormal", "n_below")


@dataclass(frozen=True)
class Unscaled:
    """One optimizer of an attempt: whose gradients the statistics are of, and how they are unscaled."""

    optimizer: int
    tensors: npt.NDArray[np.int64]
    fused: bool  # its own kernel divides by the scale; otherwise torch multiplies by the reciprocal


@dataclass(frozen=True)
class Attempt:
    """What only the host knows of an attempt. Its numbers are scale, scale_after, growth_tracker, loss, found_inf of
    each optimizer of `found`, whether a gradient was left over of each of `residues`, the largest magnitude that backward
    left in a gradient of each of `raw`, the step that each of `counted` stands at, then of each of `unscaled` the
    statistics without the histogram, tensors × SCALARS.
    """

    attempt: int
    stream: int
    scaler: int
    time: float
    order: list[str]
    losses: int
    has_loss: bool
    stepped: list[int]
    found: list[int]
    unscaled: list[Unscaled]
    manual: bool  # update() was given a new scale
    residues: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    micro_batches: int = -1
    updates: int = -1  # of its scaler, since the attempt before in its stream
    counted: list[int] = field(default_factory=list)
    lr: float | None = None
    lrs: dict[int, list[float | None]] = field(default_factory=dict)  # of each optimizer's groups
    scaled: bool = True  # by a scaler, which skips what is not finite
    logged: Entry = field(default_factory=Entry)


@dataclass(frozen=True)
class Outcome:
    """The numbers of an attempt, told apart."""

    scale: float
    scale_after: float
    growth_tracker: int
    loss: float
    skipped: list[int]
    residue: bool
    raw: dict[int, float]  # by optimizer
    counts: dict[int, float]  # state["step"] of an optimizer
    ids: npt.NDArray[np.int64]
    columns: Numbers  # (SCALARS, tensors)

    @property
    def n_nonfinite(self) -> Numbers:
        """Inf and NaN elements of each tensor, as one number that is zero where all are finite."""
        counts: Numbers = self.columns[AT["n_inf"]] + self.columns[AT["n_nan"]]
        return counts

    @property
    def has_nan(self) -> bool:
        """Whether a gradient holds NaN."""
        return bool(self.columns[AT["n_nan"]].any())


def bits(optimizers: Sequence[int]) -> int:
    """Bit i for optimizer i. A column holds 63; beyond them optimizers are left out."""
    return sum(1 << i for i in optimizers if i < 63)


def ordinary_norm(attempt: Attempt, numbers: Numbers) -> float | None:
    """The true norm of an attempt in which no step was skipped, and loss and gradients are finite; None of any other.

    Told by a glance at its numbers.
    """
    found = len(attempt.found)
    columns = numbers[_head_of(attempt) :].reshape(-1, len(SCALARS))
    is_broken = numbers[4 : 4 + found].any() or columns[:, AT["n_inf"] : AT["n_nan"] + 1].any()
    if is_broken or not math.isfinite(numbers[3]):
        return None
    return math.sqrt(columns[:, AT["sum_sq"]].sum()) / numbers[0] if numbers[0] > 0 else 0.0


def outcome_of(attempt: Attempt, numbers: Numbers) -> Outcome:
    """Tell the numbers of an attempt apart."""
    middle = 4 + len(attempt.found)
    left = middle + len(attempt.residues)
    seen = left + len(attempt.raw)
    head = _head_of(attempt)
    scale, scale_after, tracker, loss = numbers[:4].tolist()
    ids = [unscaled.tensors for unscaled in attempt.unscaled]
    return Outcome(
        scale=scale,
        scale_after=scale_after,
        growth_tracker=int(tracker),
        loss=loss if attempt.has_loss else MISSING,
        skipped=[i for i, found in zip(attempt.found, numbers[4:middle], strict=True) if found > 0],
        residue=bool(numbers[middle:left].any()),
        raw=dict(zip(attempt.raw, numbers[left:seen].tolist(), strict=True)),
        counts=dict(zip(attempt.counted, numbers[seen:head].tolist(), strict=True)),
        ids=ids[0] if len(ids) == 1 else np.concatenate(ids) if ids else np.empty(0, np.int64),
        columns=np.ascontiguousarray(numbers[head:].reshape(-1, len(SCALARS)).T),
    )


def _head_of(attempt: Attempt) -> int:
    """How many numbers stand ahead of the statistics."""
    return 4 + sum(map(len, (attempt.found, attempt.residues, attempt.raw, attempt.counted)))


def totals_of(outcome: Outcome, is_float16: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Run-level totals over all tensors; norm and headroom are missing where an element is not finite.

    Arguments:
        is_float16: (tensors,) whose gradients are known to be computed in float16.
    """
    sums = outcome.columns.sum(1)
    max_abs = outcome.columns[AT["max_abs"]]
    totals: dict[str, Any] = {name: int(sums[AT[name]]) for name in _COUNTS}
    totals["max_abs"] = float(max_abs.max(initial=0.0)) if len(max_abs) else MISSING
    totals["norm"] = totals["headroom_log2"] = MISSING
    if len(max_abs) and not (totals["n_inf"] or totals["n_nan"]):
        if outcome.scale > 0:
            totals["norm"] = float(np.sqrt(sums[AT["sum_sq"]])) / outcome.scale
        largest = float(max_abs[is_float16].max(initial=0.0))
        if largest > 0:
            totals["headroom_log2"] = float(np.log2(FLOAT16_MAX / largest))
    return totals


def by_optimizer(attempt: Attempt, outcome: Outcome) -> dict[str, float]:
    """What an attempt's row says of each optimizer, as far as its other columns do not: steps, norms, learning rates."""
    columns = {f"optimizer.{i}.step": count for i, count in outcome.counts.items() if i < MOST_OPTIMIZERS}
    if len(attempt.unscaled) > 1:
        columns |= dict(_norms(attempt, outcome))
    if len(attempt.lrs) > 1 or any(len(groups) > 1 for groups in attempt.lrs.values()):
        columns |= dict(_rates(attempt))
    return columns


def _rates(attempt: Attempt) -> Iterator[tuple[str, float]]:
    for i, groups in attempt.lrs.items():
        if i < MOST_OPTIMIZERS:
            known = enumerate(groups[: MOST_RATES // (i + 1)])
            yield from ((f"optimizer.{i}.lr.{g}", lr) for g, lr in known if lr is not None)


def _norms(attempt: Attempt, outcome: Outcome) -> Iterator[tuple[str, float]]:
    """L2 norms of the true gradients; missing where an element is not finite."""
    start = 0
    for unscaled in attempt.unscaled:
        part = slice(start, start + len(unscaled.tensors))
        start = part.stop
        is_told = unscaled.optimizer < MOST_OPTIMIZERS
        if is_told and outcome.scale > 0 and not outcome.n_nonfinite[part].any():
            norm = float(np.sqrt(outcome.columns[AT["sum_sq"], part].sum())) / outcome.scale
            yield f"optimizer.{unscaled.optimizer}.norm", norm


def applied_nonfinite(attempt: Attempt, outcome: Outcome) -> bool:
    """Whether an optimizer stepped by a gradient that is inf or NaN: with a scaler one that unscaling made so.

    Exact without a second look at the gradients: torch multiplies by float32(1 / S), which is inf for
    S <= 2^-128, and a product is finite for all elements if it is for the largest. Without a scaler nothing is
    unscaled, and nothing skipped.
    """
    if not attempt.scaled:
        return bool(outcome.n_nonfinite.any())
    start = 0
    for unscaled in attempt.unscaled:
        max_abs = outcome.columns[AT["max_abs"], start : start + len(unscaled.tensors)]
        start += len(unscaled.tensors)
        applied = unscaled.optimizer in attempt.stepped and unscaled.optimizer not in outcome.skipped
        if applied and len(max_abs) and not _unscales_finitely(max_abs.max(), outcome.scale, unscaled.fused):
            return True
    return False


def _unscales_finitely(largest: np.float64, scale: float, fused: bool) -> bool:
    if 2.0**-100 < scale < 2.0**100 and largest < 2.0**27:
        return True
    with np.errstate(all="ignore"):
        if fused:
            return bool(np.isfinite(np.float32(largest) / np.float32(scale)))
        return bool(np.isfinite(np.float32(largest) * np.float32(1.0 / np.float64(scale))))


def accumulated_data(attempt: Attempt, outcome: Outcome) -> dict[str, Any]:
    """Data of the `accumulated` event; empty where the look tells nothing.

    It does where gradients that are finite as they are unscaled were not as backward left them, or were, of a loss that
    is not finite.
    """
    if outcome.skipped or not outcome.raw or not len(outcome.ids) or outcome.n_nonfinite.any():
        return {}
    unscaled = {its.optimizer for its in attempt.unscaled if len(its.tensors)}
    looked = [i for i in outcome.raw if i in unscaled]
    broken = [i for i in looked if not np.isfinite(outcome.raw[i])]
    is_told = broken or (looked and attempt.has_loss and not np.isfinite(outcome.loss))
    return {"optimizers": looked, "nonfinite": broken} if is_told else {}


def skip_data(outcome: Outcome, row: dict[str, Any]) -> dict[str, Any]:
    """Data of the `skip` event; `row` is the attempt's."""
    nonfinite = outcome.ids[outcome.n_nonfinite > 0].tolist()
    return {
        "scale": outcome.scale,
        "scale_after": outcome.scale_after,
        "optimizers": outcome.skipped,
        "loss": outcome.loss,
        "n_inf": row["n_inf"],
        "n_nan": row["n_nan"],
        "tensors": nonfinite[:NAMED],
        "count": len(nonfinite),
    }


def change_of(attempt: Attempt, outcome: Outcome) -> str | None:
    """Type of the event that tells of the change of the scale; None where it has not changed."""
    if attempt.manual:
        return "set"
    if outcome.scale_after > outcome.scale:
        return "growth"
    return "backoff" if outcome.scale_after < outcome.scale else None
