"""Optimizers that the scaler never steps: whether they are stepped with gradients of its losses.

Many are of no concern: another model's, or a second one in float32 whose loss is never scaled. So the first step of
one only makes it a suspect. From then on it is looked at which backward passes add to its gradients, by the number
that autograd gives each pass: one that begins at a scaled loss leaves gradients that are scaled, and proves it. One of
which that is not seen in a few steps is cleared, and costs nothing any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .hooks import Hook
from .steps import listen, listen_no_more

CLEARED_AFTER: Final = 4  # steps of a suspect without a scaled gradient


class Watcher(Protocol):
    """Who is told. It is held weakly: its hooks end with it."""

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether a scaler of the run steps this optimizer, or is stepping what it is a part of; or the run is over."""

    def unscales(self, parameter: Tensor) -> bool:
        """Whether an optimizer that the scaler has unscaled holds this parameter."""

    def stepped_by_itself(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped outside the scaler with gradients of a scaled loss."""


@dataclass
class _Suspect:
    """An optimizer that stepped by itself."""

    is_scaled: bool = False  # a backward pass of a scaled loss has added to its gradients since its last step
    looks: int = 0


class Strangers:
    """Tells a watcher of such steps. Host only: it never touches a device."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher)
        self._suspects: weakref.WeakKeyDictionary[Optimizer, _Suspect] = weakref.WeakKeyDictionary()
        self._cleared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._pass = -1  # the newest backward pass of a scaled loss

    def scaled(self, losses: Iterable[Tensor]) -> None:
        """These losses have been scaled."""
        listen(self)
        if self._suspects:
            hook = Hook("scaler.strange_backward", partial(_begun, weakref.ref(self)))
            for loss in losses:
                if loss.requires_grad:
                    loss.register_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def suspects(self) -> int:
        """Optimizers that are looked at."""
        return len(self._suspects)

    def close(self) -> None:
        """Take every hook off."""
        listen_no_more(self)
        self._suspects.clear()

    def stepped(self, optimizer: Optimizer) -> None:
        """Any optimizer of the process has stepped."""
        watcher = self._watcher()
        if watcher is None or optimizer in self._cleared:
            return
        suspect = self._suspects.get(optimizer)
        if watcher.is_ours(optimizer):
            self._suspects.pop(optimizer, None)
        elif suspect is None:
            self._suspect(watcher, optimizer)
        elif suspect.is_scaled:
            suspect.is_scaled, suspect.looks = False, 0
            watcher.stepped_by_itself(optimizer)
        else:
            suspect.looks += 1
            if suspect.looks >= CLEARED_AFTER:
                del self._suspects[optimizer]
                self._cleared.add(optimizer)

    def begun(self) -> None:
        """The backward pass of a scaled loss has begun."""
        self._pass = torch._C._current_graph_task_id()

    def accumulated(self, suspect: _Suspect) -> None:
        """A backward pass has added to the gradients of a suspect."""
        suspect.is_scaled = suspect.is_scaled or torch._C._current_graph_task_id() == self._pass

    def _suspect(self, watcher: Watcher, optimizer: Optimizer) -> None:
        """Watch one of its parameters; one that shares it with an optimizer of ours is a part of that."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        parameter = next(
            (p for p in parameters if p.grad is not None and p.is_leaf and p.requires_grad), None
        )
        if parameter is None:
            return
        if watcher.unscales(parameter):
            self._cleared.add(optimizer)
            return
        suspect = self._suspects[optimizer] = _Suspect()
        hook = Hook("scaler.strange_gradient", partial(_accumulated, weakref.ref(self), weakref.ref(suspect)))
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        weakref.finalize(suspect, handle.remove)  # when it is let go, or its optimizer is gone


def _begun(strangers: weakref.ref[Strangers], *_: object) -> None:
    alive = strangers()
    if alive is not None:
        alive.begun()


def _accumulated(strangers: weakref.ref[Strangers], suspect: weakref.ref[_Suspect], *_: object) -> None:
    alive, looked_at = strangers(), suspect()
    if alive is not None and looked_at is not None:
        alive.accumulated(looked_at)
