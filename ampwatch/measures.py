"""What one scaler's watch has measured since the last update(): losses, gradients, what was left in them, rates, steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from .hooks import is_plain, local, magnitude
from .losses import Losses
from .outcome import Unscaled
from .registry import lrs_of, step_of
from .tripwires import RESIDUE, Residue


@dataclass
class OptimizerGradients:
    """One optimizer's part of the attempt that is under way; the rows lie on the devices of its gradients."""

    unscaled: Unscaled
    rows: list[Tensor]
    with_grad: int  # parameters that have a gradient, also one without statistics


@dataclass
class Measures:
    """By the index of the optimizer, and in the order in which they were measured. Nothing here synchronises."""

    losses: Losses = field(default_factory=Losses)
    loss_has_graph: bool | None = None  # None before the first loss
    gradients: dict[int, OptimizerGradients] = field(default_factory=dict)
    lrs: dict[int, list[float | None]] = field(default_factory=dict)  # of each optimizer that was stepped
    counts: dict[int, Tensor] = field(default_factory=dict)  # and the step it stands at
    _accumulations: dict[int, int] = field(default_factory=dict)
    _residues: dict[int, Residue] = field(default_factory=dict)
    _raw: dict[int, Tensor] = field(default_factory=dict)

    def accumulating(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass is about to add to the gradient of this parameter."""
        self._residues.setdefault(optimizer, Residue()).begin(parameter)

    def accumulated(self, optimizer: int, parameter: Tensor, more: Sequence[Tensor] = ()) -> None:
        """A backward pass has added to the gradient of an optimizer's first parameter.

        Arguments:
            more: others of its parameters, which the pass has come through by now, or whose gradients are older.
        """
        self._accumulations[optimizer] = self._accumulations.get(optimizer, 0) + 1
        if optimizer not in self.gradients:  # of a GAN the critic may be unscaled by now
            self._look(optimizer, [parameter, *more])

    def _look(self, optimizer: int, parameters: Sequence[Tensor]) -> None:
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        looked = [g for g in grads if is_plain(g) and g.layout is torch.strided and _is_cheap(g)]
        alike = [g for g in looked if (g.dtype, g.device) == (looked[0].dtype, looked[0].device)]
        if alike:
            with torch.no_grad():
                self._raw[optimizer] = magnitude(torch.cat([g.flatten()[:RESIDUE] for g in alike]))

    def stepping(self, index: int, optimizer: Optimizer) -> None:
        """Note the learning rates that the step is taken with."""
        self.lrs[index] = lrs_of(optimizer)

    def stepped(self, index: int, optimizer: Optimizer) -> None:
        """Note which step the optimizer stands at."""
        if (step := step_of(optimizer)) is not None:
            self.counts[index] = step

    def left_in(self, optimizer: int) -> Tensor | None:
        """Whether anything was left in its gradients when the window began; None where they were cleared."""
        return self._residues[optimizer].found if optimizer in self._residues else None

    def raw_in(self, optimizer: int) -> Tensor | None:
        """Largest magnitude in some of its gradients as backward left them, before the loop could change it; None if unseen.

        Of their first elements, a scalar on their device; NaN where one is NaN.
        """
        return self._raw.get(optimizer)

    def micro_batches_of(self, optimizers: Sequence[int]) -> int:
        """Accumulations into one parameter of the first of them that had any; -1 where that is not known."""
        return next((n for i in optimizers if (n := self._accumulations.get(i))), -1)

    def first_lr(self) -> float | None:
        """Of the first group of the first stepped optimizer."""
        return next((lrs[0] for lrs in self.lrs.values() if lrs), None)

    def numbers(
        self, before: Tensor, after: Tensor, tracker: Tensor, found: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """In the order of `Attempt`, without the statistics.

        Arguments:
            before, after: the scale of the attempt, and the one that update() left.
            tracker: clean attempts since the last change.
            found: found_inf of each optimizer.
        """
        loss = self.losses.mean()
        loss = before if loss is None else loss  # in its place, and not read
        left = [flag for i in found if (flag := self.left_in(i)) is not None]
        raw = [largest for i in found if (largest := self.raw_in(i)) is not None]
        return [before, after, tracker, loss, *found.values(), *left, *raw, *self.counts.values()]

    def rows(self) -> list[Tensor]:
        """The statistics of all optimizers."""
        return [row for gradients in self.gradients.values() for row in gradients.rows]


def _is_cheap(grad: Tensor) -> bool:
    """Whether its first elements are had without a copy, or a copy is small: of channels_last it is all of it."""
    return grad.is_contiguous() or grad.numel() <= 4 * RESIDUE
