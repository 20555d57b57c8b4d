"""When a scaler's optimizers are inspected, and the `check` events that tell what was found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from .checks import MOST_NAMED, facts_of
from .names import Name
from .ownership import ownership
from .registry import state_of

STARVED: Final = (
    8  # steps in a row in which as many parameters are without a gradient, before their owners are asked
)
MOST_LOOKS: Final = 2  # of an optimizer: each goes through all objects of the process


@dataclass
class _Starved:
    """Parameters of an optimizer that are without a gradient, step after step."""

    count: int = 0
    run: int = 0
    looks: int = 0

    def calls(self, optimizer: Optimizer, with_grad: int) -> bool:
        """One more step: whether it is time to ask for the owners."""
        count = sum(len(group["params"]) for group in optimizer.param_groups) - with_grad
        self.run = self.run + 1 if count == self.count else 1
        self.count = count
        due = count > 0 and self.run == STARVED and self.looks < MOST_LOOKS
        self.looks += due
        return due


class Inspection:
    """Inspects an optimizer when it is met, once more when it has state, and when it is stepped without a gradient.

    Arguments:
        event: records an event.
        names: what the model calls its parameters, by identity; asked when it is needed.
    """

    def __init__(self, event: Callable[..., None], names: Callable[[], Mapping[int, Name]]) -> None:
        self._event = event
        self._names = names
        self._met: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._with_state: set[int] = set()
        self._empty: set[int] = set()
        self._starved: dict[int, _Starved] = {}

    def meet(self, index: int, optimizer: Optimizer, unscaled: Collection[int]) -> None:
        """The scaler meets an optimizer; `unscaled` are those whose gradients it has unscaled since the last update."""
        self._met[index] = optimizer
        self._tell(index, optimizer, unscaled)

    def step(self, index: int, optimizer: Optimizer) -> None:
        """An optimizer is about to be stepped; from its second step taken on it has state."""
        if index not in self._with_state and state_of(optimizer):
            self._with_state.add(index)
            self._tell(index, optimizer, ())

    def gradients(self, index: int, optimizer: Optimizer, count: int, *, loss_has_graph: bool | None) -> None:
        """An optimizer is being stepped, and `count` of its parameters have a gradient."""
        if count:
            self._empty.discard(index)
            if self._starved.setdefault(index, _Starved()).calls(optimizer, count):
                self._look_for_owners(index, optimizer)
        elif index not in self._empty:
            self._empty.add(index)
            # One that had gradients before holds the right tensors, and a loss without a graph gives none to any.
            is_strange = loss_has_graph is not False and index not in self._starved
            instead = self._instead_of(optimizer) if is_strange else None
            more = {"stepped_empty": True, "loss_has_graph": loss_has_graph}
            self._tell(index, optimizer, (), **more, instead=instead)

    def _look_for_owners(self, index: int, optimizer: Optimizer) -> None:
        """Some of its parameters never have a gradient: whether others took their place."""
        found = ownership(optimizer)
        if found.is_replaced:
            self._tell(index, optimizer, (), unowned=len(found.unowned), missed=self._named(found.missed))

    def _instead_of(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """What has gradients while none of its parameters has one, where that is a model in the place of its own."""
        found = ownership(optimizer)
        return self._named(found.missed) if found.is_of_another_model else None

    def _named(self, missed: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        names = self._names()
        told = [names[id(p)].name if id(p) in names else name for name, p in missed]
        return {"count": len(told), "tensors": told[:MOST_NAMED]}

    def _tell(self, index: int, optimizer: Optimizer, unscaled: Collection[int], **more: Any) -> None:
        others = {i: other for i, other in self._met.items() if i in unscaled and i != index}
        facts = facts_of(optimizer, index, names=self._names(), others=others)
        self._event("check", **facts, **more)
