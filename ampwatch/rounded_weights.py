"""Whether weights in float16 and bfloat16 move at all.

    weight = torch.ones(8, dtype=torch.bfloat16)    # the next number above is 1.0078
    weight -= 1e-3 * gradient                       # rounds to what was there, now and in every step to come

An update of less than half a unit in the last place is rounded away. Steps are taken and the loss is finite, so that
no gradient tells it. So some elements are kept as the first step finds them, and what stands in their place before
the 2nd, 4th, 8th … step is compared: not one step with the next, as what an optimizer gathers may move them later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from .hooks import Numbers, Observation, gathered, is_plain, local
from .registry import real, state_of

LOW: Final = frozenset((torch.float16, torch.bfloat16))
PARAMETERS: Final = 4  # of an optimizer, the largest ones …
ELEMENTS: Final = 8192  # … and of each its first elements: 64 KiB in all
GRADIENTS: Final = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"),
        *("acc_delta", "grad_avg", "sum", "prev", "step_size", "state1", "state2"),
    )
)
"""What the optimizers of torch and bitsandbytes gather of gradients, by its name."""


@dataclass
class _Kept:
    """What an optimizer's first step found."""

    steps: int = 0  # of the optimizer
    kept_at: int = 0  # the step …
    since: int = 0  # … and the attempt at which they were kept
    weights: dict[int, Tensor] = field(default_factory=dict)  # by the identity of the parameter


class RoundedWeights:
    """Looks at powers of two of an optimizer's steps; event `weights`. Nothing synchronises.

    Arguments:
        index: the index of a parameter in the records.
    """

    def __init__(self, index: Callable[[Tensor], int]) -> None:
        self._index = index
        self._of: dict[int, _Kept] = {}

    def stepping(self, optimizer: int, itself: Optimizer, attempt: int) -> Observation | None:
        """The optimizer is about to step in this attempt; what is seen, once there is something to compare with."""
        its = self._of.setdefault(optimizer, _Kept())
        its.steps += 1
        if its.steps & (its.steps - 1):
            return None
        low = {id(p): (p, lr) for p, lr in _in_low_precision(itself)}
        if not its.weights:
            largest = nlargest(PARAMETERS, low, key=lambda key: low[key][0].numel())
            its.weights = {key: _part(low[key][0]).clone() for key in largest}
            its.kept_at, its.since = its.steps, attempt
            return None
        now = [low[key] for key in its.weights if key in low]
        if len(now) < len(its.weights) or any(_may_be_carried_on(itself, p) for p, _ in now):
            return None
        return self._compared(optimizer, its, now)

    @torch.no_grad()
    def _compared(
        self, optimizer: int, its: _Kept, now: Sequence[tuple[Tensor, float]]
    ) -> Observation | None:
        pairs = [(then, _part(p)) for then, (p, _) in zip(its.weights.values(), now, strict=True)]
        if any(then.shape != part.shape or then.device != part.device for then, part in pairs):
            return None
        graded = [_part(p.grad).ne(0).sum() for p, _ in now if p.grad is not None]
        moved = [then.ne(part).sum() for then, part in pairs]
        told = {
            "optimizer": optimizer,
            "tensors": [self._index(p) for p, _ in now],
            "lr": max(lr for _, lr in now),
            "since": its.since,
            "steps": its.steps - its.kept_at,
            "compared": sum(then.numel() for then, _ in pairs),
        }
        return Observation("weights", gathered([*graded, *moved]), partial(_told, told))


def _in_low_precision(optimizer: Optimizer) -> Iterator[tuple[Tensor, float]]:
    """Parameters in float16 or bfloat16 that are to be moved, and their learning rates."""
    for group in optimizer.param_groups:
        lr = real(group.get("lr"))
        if lr:
            yield from ((p, lr) for p in group["params"] if p.dtype in LOW and _has_gradient(p))


def _may_be_carried_on(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether what is rounded away may be kept: in a copy of the weights in float32, or by Kahan summation."""
    state = state_of(optimizer).get(parameter)
    kept = state.items() if isinstance(state, dict) else ()
    large = {name for name, value in kept if isinstance(value, Tensor) and value.numel() == parameter.numel()}
    return parameter.numel() > 1 and not large <= GRADIENTS


def _has_gradient(parameter: Tensor) -> bool:
    grad = None if parameter.grad is None else local(parameter.grad)
    return grad is not None and is_plain(grad) and grad.layout is torch.strided and is_plain(local(parameter))


def _part(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).flatten()[:ELEMENTS]


def _told(told: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    graded, moved = numbers.reshape(2, -1).sum(1).tolist()
    return told | {"with_gradient": int(graded), "moved": int(moved)}
