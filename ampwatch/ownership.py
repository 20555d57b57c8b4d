"""Whose parameters are: of the modules and the optimizers of the process, as the collector knows them.

An optimizer that was made before a layer was replaced goes on holding the old one: its tensors have no gradient, and
the new ones, which have, are in no optimizer. Nothing raises, and the layer is never trained. Who holds what is asked
of the whole process, as a scaler is given a model at most, and no optimizer but those that it steps.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer


@dataclass(frozen=True)
class Ownership:
    """Of one optimizer.

    Arguments:
        starved: its trainable parameters without a gradient.
        unowned: those of its trainable parameters that no module has.
        missed: parameters with a gradient that a module has and no optimizer holds, with names made of their modules'.
    """

    starved: Sequence[Tensor]
    unowned: Sequence[Tensor]
    missed: Sequence[tuple[str, Tensor]]

    @property
    def is_replaced(self) -> bool:
        """Whether layers took the place of some that it goes on holding.

        Not where parameters that no module has get gradients: a loop that keeps copies in float32 gives them these.
        """
        starved = set(map(id, self.starved))
        return bool(self.missed and self.unowned) and starved.issuperset(map(id, self.unowned))

    @property
    def is_of_another_model(self) -> bool:
        """Whether it holds another model, or a copy, instead of what is trained; of one that has no gradient at all."""
        shapes = (sorted(p.shape for p in part) for part in (self.starved, [p for _, p in self.missed]))
        return bool(self.missed) and (
            len(self.unowned) == len(self.starved) or len({*map(tuple, shapes)}) == 1
        )


def ownership(optimizer: Optimizer) -> Ownership:
    """Look once through all objects of the process: 0.2 s for 300,000. No synchronisation."""
    modules, optimizers = _modules_and_optimizers()
    mine = [p for p in _held_by(optimizer) if p.requires_grad and not is_lazy(p) and p.numel()]
    held = {id(p) for each in (*optimizers, optimizer) for p in _held_by(each)}
    owned = {id(p): (m, n, p) for m in modules for n, p in m._parameters.items() if p is not None}
    return Ownership(
        starved=[p for p in mine if p.grad is None],
        unowned=[p for p in mine if id(p) not in owned],
        missed=[
            (f"{type(module).__name__}.{name}", p)
            for key, (module, name, p) in owned.items()
            if p.requires_grad and p.grad is not None and key not in held
        ],
    )


def _modules_and_optimizers() -> tuple[list[nn.Module], list[Optimizer]]:
    """All of the process, by their type: isinstance would ask each object, which may be a proxy."""
    gc.collect()  # models of trainings that are over would be taken for those that took a layer's place
    objects = gc.get_objects()
    types = {each for each in set(map(type, objects)) if issubclass(each, (nn.Module, Optimizer))}
    found: list[Any] = [
        *compress(objects, map(types.__contains__, map(type, objects)))
    ]  # in C: there are many
    modules = [each for each in found if issubclass(type(each), nn.Module)]
    return modules, [each for each in found if issubclass(type(each), Optimizer)]


def _held_by(optimizer: Optimizer) -> Sequence[Tensor]:
    groups = getattr(optimizer, "param_groups", ())  # there is none yet while one is being made
    return list(chain.from_iterable(group["params"] for group in groups))
