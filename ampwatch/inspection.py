"""When a scaler's optimizers are inspected, and the `check` events that tell what was found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from .checks import facts_of
from .names import Name


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

    def meet(self, index: int, optimizer: Optimizer, unscaled: Collection[int]) -> None:
        """The scaler meets an optimizer; `unscaled` are those whose gradients it has unscaled since the last update."""
        self._met[index] = optimizer
        self._tell(index, optimizer, unscaled)

    def step(self, index: int, optimizer: Optimizer) -> None:
        """An optimizer is about to be stepped; from its second step taken on it has state."""
        if index not in self._with_state and optimizer.state:
            self._with_state.add(index)
            self._tell(index, optimizer, ())

    def gradients(self, index: int, optimizer: Optimizer, count: int, *, loss_has_graph: bool | None) -> None:
        """An optimizer is being stepped, and `count` of its parameters have a gradient."""
        if count:
            self._empty.discard(index)
        elif index not in self._empty:
            self._empty.add(index)
            self._tell(index, optimizer, (), stepped_empty=True, loss_has_graph=loss_has_graph)

    def _tell(self, index: int, optimizer: Optimizer, unscaled: Collection[int], **more: Any) -> None:
        others = {i: other for i, other in self._met.items() if i in unscaled and i != index}
        facts = facts_of(optimizer, index, names=self._names(), others=others)
        self._event("check", **facts, **more)
