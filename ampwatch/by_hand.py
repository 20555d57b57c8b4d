"""Whether the loop itself divides gradients by the loss scale, which step() or unscale_() does too.

    for p in model.parameters():
        p.grad /= scaler.get_scale()
    scaler.step(optimizer)             # divides by it again

Gradients are then too small by the scale from the first step on, with nothing beside them to tell it by. So one
gradient of each optimizer is looked at twice, between which torch does nothing to it: as backward leaves it and as
torch is about to unscale it; and as unscale_() leaves it and as step() is about to take it. What lies between is the
loop's own. A clip multiplies by one number as well, though not by 1/S again and again. Where a loop begins to do so
in the middle of a run, the norm falls steeply, upon which it is looked at again; not if it does so behind
unscale_(), for which it is looked at now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from .hooks import Numbers, Observation, gathered
from .looks import AT_FIRST, ENOUGH, LOOKS, is_due, sample_of

AGAIN: Final = 32  # falls of the norm upon which it begins anew
LEAST_SCALE: Final = 128.0
NEAR: Final = 1e-3  # relative
_VALUES: Final = 4  # of a look


@dataclass
class _Looked:
    parameter: Tensor | None = None  # of the window
    then: Tensor | None = None
    values: list[Tensor] = field(default_factory=list)
    windows: int = 0


class ByHand:
    """Looks at windows of each optimizer, once one of its attempts met neither inf nor NaN; never waits.

    At the first ones, at some later, and at those behind a steep fall of the norm.
    """

    def __init__(self) -> None:
        self._of: dict[int, _Looked] = {}
        self._since: int | None = None
        self._falls = 0

    def fell(self, attempt: int) -> None:
        """A norm fell steeply at this attempt."""
        if self._falls < AGAIN:
            self._falls += 1
            self._since = attempt
            for its in self._of.values():
                its.windows, its.values = 0, []

    def accumulated(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass has added to this gradient."""
        its = self._of.setdefault(optimizer, _Looked())
        if is_due(its.windows):
            its.parameter, its.then = parameter, sample_of(parameter)

    def left(self, optimizer: int) -> None:
        """unscale_() has left the gradients as they are now."""
        its = self._of.get(optimizer)
        if its is not None and its.parameter is not None:
            its.then = sample_of(its.parameter)

    def taken(self, optimizer: int, scale: Tensor) -> None:
        """Torch is about to unscale the gradients, or to step with those that it has unscaled."""
        its = self._of.get(optimizer)
        now = None if its is None or its.parameter is None else sample_of(its.parameter)
        if its is None or its.then is None or now is None:
            return
        if its.then.shape == now.shape:  # FSDP1 has reduced a flat gradient to this rank's shard since
            its.values.append(_compared(its.then, now, scale))
        its.then = None

    def ended(self, optimizer: int, order: list[str]) -> Observation | None:
        """The optimizer is stepped. Every few windows what was seen, an event `call_fault` if that was a division."""
        its = self._of.get(optimizer)
        if its is None:
            return None
        its.windows += 1
        if its.windows % LOOKS or not its.values:
            return None
        fault: dict[str, Any] = {
            "fault": "divided_by_hand",
            "optimizer": optimizer,
            "order": order,
            "raised": False,
        }
        if self._since is not None and its.windows <= AT_FIRST:
            fault["since"] = self._since
        values, its.values = gathered(its.values), []
        return Observation("call_fault", values, partial(_fault_in, fault))

    def updated(self) -> None:
        """A window has ended: no parameter is kept beyond it."""
        for its in self._of.values():
            its.parameter, its.then = None, None


@torch.no_grad()
def _compared(then: Tensor, now: Tensor, scale: Tensor) -> Tensor:
    """Their products, and the scale: (4,) float64."""
    products = [then @ then, now @ then, now @ now]
    return torch.stack([*products, scale.to(then.device, torch.float64, non_blocking=True)])


def _fault_in(fault: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    divided = sum(map(_is_divided, numbers.reshape(-1, _VALUES).tolist()))
    return fault if divided >= ENOUGH else {}


def _is_divided(look: Sequence[float]) -> bool:
    """Whether it is the same but for a factor of 1/S."""
    before, product, after, scale = look
    if not (0 < before < float("inf") and after > 0 and scale >= LEAST_SCALE):
        return False
    rest = after - product * product / before
    return abs(product / before * scale - 1) <= NEAR and rest <= NEAR**2 * after
