"""Whether a pass of a loss as it is adds to the gradients of a scaled one, beside which it is nothing.

    scaler.scale(loss).backward()
    penalty.backward()              # divided by the scale as well: 1/65536 of what was meant
    scaler.step(optimizer)

Some elements of a gradient are compared before and after such a pass, of which `scaled_passes.py` tells: what it has
added is of the size of the rest divided by the scale. A pass that carries on the gradient of a scaled loss, as chunk
after chunk of a large batch, adds what is multiplied by the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from .hooks import Numbers, Observation, gathered
from .looks import ENOUGH, LOOKS, is_due, sample_of

LARGEST: Final = 32.0  # a true gradient beside the true gradient of the scaled loss …
SMALL: Final = 2.0**-6  # … and what is added beside what is there
_VALUES: Final = 3  # of a look


@dataclass
class _Looked:
    before: Tensor | None = None  # of the window
    sizes: Tensor | None = None
    values: list[Tensor] = field(default_factory=list)
    windows: int = 0  # that had such a pass


class UnscaledPasses:
    """Looks at the first such pass of a window; never waits."""

    def __init__(self) -> None:
        self._of: dict[int, _Looked] = {}

    def accumulating(self, optimizer: int, parameter: Tensor) -> None:
        """A pass that came through no scaled loss, behind one that did, is about to add to this gradient."""
        its = self._of.setdefault(optimizer, _Looked())
        if its.sizes is None and is_due(its.windows):
            its.before = sample_of(parameter)

    def accumulated(self, optimizer: int, parameter: Tensor) -> None:
        """A pass has added to it."""
        its = self._of.get(optimizer)
        if its is None or its.before is None:
            return
        before, after = its.before, sample_of(parameter)
        its.before = None
        if after is not None and after.shape == before.shape:  # FSDP1 reduces a flat gradient to a shard
            added = after - before
            its.sizes = torch.stack([before @ before, added @ added])

    def taken(self, optimizer: int, scale: Tensor, order: list[str]) -> Observation | None:
        """Torch is about to unscale them. Every few windows what was seen, an event `call_fault` if passes were unscaled."""
        its = self._of.get(optimizer)
        if its is None or its.sizes is None:
            return None
        its.windows += 1
        its.values.append(gathered([its.sizes, scale]))
        if len(its.values) < LOOKS:
            return None
        fault = {"fault": "unscaled_backward", "optimizer": optimizer, "order": order, "raised": False}
        values, its.values = gathered(its.values), []
        return Observation("call_fault", values, partial(_fault_in, fault))

    def updated(self) -> None:
        """A window has ended."""
        for its in self._of.values():
            its.before = its.sizes = None


def _fault_in(fault: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    unscaled = sum(map(_is_unscaled, *numbers.reshape(-1, _VALUES).T.tolist()))
    return fault if unscaled >= ENOUGH else {}


def _is_unscaled(before: float, added: float, scale: float) -> bool:
    """By the squares of their L2 norms."""
    most = min(LARGEST / scale, SMALL)
    return 0 < before < float("inf") and 0 < added <= before * most**2
