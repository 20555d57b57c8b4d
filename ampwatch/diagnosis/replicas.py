"""Ranks that should be copies of each other, and are not: other gradients after averaging, or other weights.

What DistributedDataParallel averages (event `replicas`) is the same on every rank of its group, to the bit where the
machines are alike; so are weights that only such gradients move. Where no such wrapper was seen, ranks may train by
themselves on purpose: then it takes that nothing of them agrees, neither a loss nor the gradient of any tensor.
Tensor and expert parallel ranks, shards and gradients that are averaged by other means agree somewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .case import Case
from .moments import Moment, moment_of
from .rows import Rows

NEAR: Final = 1e-3  # relative: how far norms of the same gradients may differ between unlike machines
NEAR_WEIGHTS: Final = 1e-4
LASTS: Final = 3  # attempts in a row
ALONE: Final = 8  # attempts in which nothing agrees
LOOKED_AT: Final = 5  # of these, those whose tensors are compared


class Apart(NamedTuple):
    """The first moment at which two ranks were found apart, and the number of each that shows it."""

    what: Literal["gradients", "weights", "alone"]
    at: Moment
    values: tuple[float, float]


@dataclass(slots=True)
class Norms:
    """The norms and losses of two ranks, attempt by attempt."""

    attempts: int = 0  # in which both have a norm of equally many elements
    differing: int = 0
    equal_losses: int = 0
    run: int = 0  # of differing ones, up to the newest
    begun: Apart | None = None  # where it began
    found: Apart | None = None  # the first that lasted

    def fold(self, a: Rows, b: Rows) -> None:
        """Take in attempts that both have, in order."""
        both = np.isfinite(a["norm"]) & np.isfinite(b["norm"]) & (a["numel"] == b["numel"]) & (a["numel"] > 0)
        a, b = a[both], b[both]
        differ = ~_near(a["norm"], b["norm"], NEAR)
        self.attempts += len(a)
        self.differing += int(differ.sum())
        self.equal_losses += int((a["loss"] == b["loss"]).sum())
        if self.found is not None:
            return
        if not differ.any():
            self.run = 0 if len(a) else self.run
            return
        for row, other, apart in zip(a, b, differ, strict=True):
            self._add(row, other, apart=bool(apart))

    def _add(self, row: Any, other: Any, *, apart: bool) -> None:
        self.run = self.run + 1 if apart else 0
        if self.run == 1:
            self.begun = Apart("gradients", moment_of(row), (float(row["norm"]), float(other["norm"])))
        if self.run == LASTS and self.found is None:
            self.found = self.begun

    @property
    def never_agree(self) -> bool:
        """Whether in many attempts neither a norm nor a loss was the same."""
        return self.attempts >= ALONE and self.differing == self.attempts and not self.equal_losses


def apart(a: Case, b: Case, norms: Norms) -> Apart | None:
    """How two ranks that should be copies differ; `a` is the lowest rank."""
    if b.described.averaged_with == a.rank:
        found = [each for each in (norms.found, _weights(a, b)) if each is not None]
        return min(found, key=lambda each: each.at, default=None)
    wrapped = a.described.replicas or b.described.replicas
    if wrapped or not norms.never_agree or not _same_model(a, b) or _a_tensor_agrees(a, b):
        return None
    assert norms.found is not None
    return norms.found._replace(what="alone")


def _weights(a: Case, b: Case) -> Apart | None:
    """The first check in which the weights of both were measured, and differ."""
    mine, other = a.described.reaches, b.described.reaches
    if mine == other:  # of copies, as a rule
        return None
    for attempt in sorted(at for at in mine.keys() & other.keys() if mine[at] != other[at]):
        low, high = mine[attempt], other[attempt]
        if low is not None and high is not None and not _near(low, high, NEAR_WEIGHTS):
            return Apart("weights", Moment(attempt, a.step_of(attempt)), (low, high))
    return None


def _same_model(a: Case, b: Case) -> bool:
    """Whether both train tensors of the same names and shapes, and not shards: those are flat, or told as such."""
    mine, other = (_shapes(each.described.tensors) for each in (a, b))
    tensors = [*a.described.tensors.values(), *b.described.tensors.values()]
    sharded = "Sharded" in a.described.scaler_class or any(t.get("placements") for t in tensors)
    flat = all(len(shape) < 2 for _, shape in mine.values())
    return bool(mine) and mine == other and not sharded and not flat


def _shapes(tensors: Mapping[int, Any]) -> dict[int, tuple[str, tuple[int, ...]]]:
    return {i: (str(t.get("name")), tuple(t.get("shape") or ())) for i, t in tensors.items()}


def _a_tensor_agrees(a: Case, b: Case) -> bool:
    """Whether a tensor has the same largest gradient on both in the samples compared; so, too, where there are too few."""
    others = {sample.attempt: sample.tensors for sample in b.samples}
    common = [(sample.tensors, others[sample.attempt]) for sample in a.samples if sample.attempt in others]
    seen, differing = set[int](), set[int]()
    for mine, other in common[:LOOKED_AT]:
        both, i, j = np.intersect1d(mine["tensor"], other["tensor"], return_indices=True)
        seen |= set(both.tolist())
        differing |= set(both[mine["max_abs"][i] != other["max_abs"][j]].tolist())
    return len(common) < LOOKED_AT or seen != differing


def _near(a: Any, b: Any, tolerance: float) -> npt.NDArray[np.bool_]:
    near: npt.NDArray[np.bool_] = np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b))
    return near
