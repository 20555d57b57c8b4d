"""What a fused optimizer does in its first steps: it must not divide gradients twice, nor apply an overflow.

Such an optimizer divides by the scale and skips in its own kernel; torch tells it by `grad_scale` and `found_inf`
whether it is to. Of a few elements are compared, before and after a step: gradient, weights, first moment, and state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from .hooks import Numbers, Observation, gathered, is_plain, magnitudes
from .registry import first_lr, state_of

FEW: Final = 4  # parameters …
ELEMENTS: Final = 4096  # … and of each its first elements
STEPS: Final = 32  # of an optimizer that are looked at: the descent from the initial scale is among them
MOMENTS: Final = ("exp_avg", "momentum_buffer")
STATES: Final = 4  # tensors that an optimizer keeps of one parameter
COUNT: Final = "step"  # the name by which torch's optimizers keep how many steps they have taken
_NAMES: Final = ("scale", "gradient", "gradient_after", "moved", "moment", "state", "count", "found_inf")
_TRACES: Final = ("moved", "moment", "state", "count")


class FusedStep:
    """Looks at one step of one optimizer; event `fused_step`. Nothing synchronises.

    Arguments:
        index: of the optimizer in the records.
        scale: the loss scale, a tensor on its device.
        is_unscaled: its gradients were unscaled before the step.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer, index: int, scale: Tensor, *, is_unscaled: bool) -> None:
        self.index = index
        self._optimizer, self._is_unscaled = optimizer, is_unscaled
        self._is_first = not state_of(optimizer)
        self._parameters = list(islice(_with_gradients(optimizer), FEW))
        self._weights = [_part(p).clone() for p in self._parameters]
        self._state = {at: part.clone() for at, part in self._states().items()}
        self._none = scale.new_zeros(())
        self._before = [scale.clone(), *self._gradients()]

    @torch.no_grad()
    def ended(self, found_inf: Tensor | None) -> Observation:
        """The step is over; `found_inf` is what torch has found in the gradients."""
        moved = [_moved(_part(p), w) for p, w in zip(self._parameters, self._weights, strict=True)]
        moments = self._moments() if self._is_first else []
        counts, kept = self._state_changes()
        values = gathered(
            [
                *self._before,
                *self._gradients(),
                self._largest(moved),
                self._largest(moments),
                self._largest(kept),
                self._largest(counts),
                self._none if found_inf is None else found_inf,
            ]
        )
        named = {"optimizer": self.index, "unscaled": self._is_unscaled, "lr": first_lr(self._optimizer)}
        return Observation("fused_step", values, partial(_told, named))

    def _gradients(self) -> list[Tensor]:
        return [self._largest([_part(p.grad) for p in self._parameters if p.grad is not None])]

    def _largest(self, parts: list[Tensor]) -> Tensor:
        return magnitudes(parts).max() if parts else self._none

    def _moments(self) -> list[Tensor]:
        states = [state_of(self._optimizer).get(p, {}) for p in self._parameters]
        return [
            _part(state[name]) for state in states for name in MOMENTS if isinstance(state.get(name), Tensor)
        ]

    def _states(self) -> dict[tuple[int, str], Tensor]:
        """What the optimizer keeps, by parameter and name: copies are compared, as a step may replace the tensors."""
        kept = ((i, state_of(self._optimizer).get(p, {})) for i, p in enumerate(self._parameters))
        return {
            (i, name): _part(value)
            for i, state in kept
            for name, value in islice(state.items(), STATES)
            if is_plain(value) and value.is_floating_point()
        }

    def _state_changes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of the counts of steps, and of all else that is kept.

        A count that was not there before began at 0, and anything else at numbers, whatever they were.
        """
        after = self._states()
        begun = {
            at: torch.zeros_like(part)
            if at[1] == COUNT
            else part.where(part.isfinite(), torch.zeros_like(part))
            for at, part in after.items()
        }
        changes = {
            at: _moved(after[at], part)
            for at, part in (begun | self._state).items()
            if at in after and after[at].shape == part.shape and after[at].device == part.device
        }
        counts = [change for at, change in changes.items() if at[1] == COUNT]
        return counts, [change for at, change in changes.items() if at[1] != COUNT]


class FusedSteps:
    """The first steps of each fused optimizer, of which one at a time is under way."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._under_way: FusedStep | None = None

    def begin(
        self, optimizer: Optimizer, index: int, scale: Callable[[], Tensor], *, is_unscaled: bool
    ) -> None:
        """An optimizer is about to step. Arguments: as of `FusedStep`; `scale` is only asked for where it is looked at."""
        times = self._times.get(index, 0)
        if getattr(optimizer, "_step_supports_amp_scaling", False) and times < STEPS:
            self._times[index] = times + 1
            self._under_way = FusedStep(optimizer, index, scale(), is_unscaled=is_unscaled)

    def ended(self) -> FusedStep | None:
        """The step that was under way, None where it is not looked at."""
        step, self._under_way = self._under_way, None
        return step


def _with_gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    yield from (p for p in parameters if is_plain(p) and p.grad is not None and is_plain(p.grad))


def _part(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:ELEMENTS]


def _moved(after: Tensor, before: Tensor) -> Tensor:
    """The change of weights; of those that were no numbers before there is none."""
    return torch.where(before.isfinite(), after - before, torch.zeros_like(before))


def _told(named: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    told = named | dict(zip(_NAMES, numbers.tolist(), strict=True))
    overflow_left_a_trace = told["found_inf"] and any(told[n] != 0 for n in _TRACES)
    return told if named["unscaled"] or overflow_left_a_trace else {}
