"""What a watch hears of lastingly: the steps of the optimizers it has seen, and, by hooks, one parameter of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .hooks import Announcements, Handle, Hook, after_forward, is_plain, local, takes_hooks
from .steps import listen, listen_no_more

RESIDUE: Final = 4096  # elements of a gradient that are looked at before a backward pass adds to it


class Watcher(Protocol):
    """Who is told. It is held weakly: its hooks end with it."""

    def stepped(self, optimizer: int, itself: Optimizer) -> None:
        """An optimizer has stepped."""

    def accumulating(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass is about to add to the gradient of this parameter, one of the optimizer's."""

    def accumulated(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of this parameter."""


class Tripwires:
    """Tells a watcher of steps and accumulations, by the index of the optimizer.

    Arguments:
        announced: told of hooks that were put on; they stay until this is closed.
        hooks: whether to put hooks on parameters and models; without them it tells of steps only.
    """

    def __init__(self, watcher: Watcher, announced: Announcements, *, hooks: bool = True) -> None:
        self._watcher, self._announced, self._hooks = weakref.ref(watcher), announced, hooks
        self._handles: list[Handle] = []
        self._indices: dict[int, int] = {}  # by identity, by which torch keeps its own state of an optimizer
        self._stepping: MutableMapping[Optimizer, int] = WeakIdKeyDictionary()
        self._counted: set[int] = set()

    def knows(self, index: int) -> bool:
        """Whether the optimizer's steps are watched."""
        return index in self._indices.values()

    def index_of(self, key: int) -> int | None:
        """Index of the optimizer with this identity."""
        return self._indices.get(key)

    def on_step(self, index: int, optimizer: Optimizer) -> None:
        """Watch the steps of an optimizer."""
        self._indices[id(optimizer)] = index
        # Of a wrapper that hands everything on, what steps is inside; an imitation has no hooks for its steps.
        its = getattr(getattr(optimizer, "register_step_post_hook", None), "__self__", None)
        if its is not None:
            self._stepping[its] = index
            listen(self)

    def stepped(self, optimizer: Optimizer) -> None:
        """Any optimizer of the process has stepped."""
        watcher, index = self._watcher(), self._stepping.get(optimizer)
        if watcher is not None and index is not None:
            watcher.stepped(index, optimizer)

    def on_accumulation(self, index: int, optimizer: Optimizer, parameter: Tensor) -> None:
        """Count the accumulations into this parameter, which is one of the optimizer's."""
        if self._hooks and index not in self._counted and parameter.is_leaf and parameter.requires_grad:
            self._counted.add(index)
            # A hook that held its parameter would keep it alive; of a weak reference see `registry._Kept`.
            finding = partial(_held_by, weakref.ref(optimizer), id(parameter))
            before = Hook("scaler.accumulating", partial(_accumulating, self._watcher, index, finding))
            self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
            hook = Hook("scaler.accumulated", partial(_accumulated, self._watcher, index))
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            self._announced.add(["accumulations"], 2, "optimizer_met")

    def on_forward(self, model: nn.Module, see: Callable[..., None]) -> None:
        """Show this every forward pass of a model, as a forward hook."""
        if self._hooks and takes_hooks(model):
            self._handles.append(after_forward(model, Hook("optimizer.forward", see)))
            self._announced.add(["forward"], 1, "model_given")

    def close(self) -> None:
        """Take every hook off, and hear of no step."""
        listen_no_more(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Residue:
    """Whether anything was left in a gradient when a window began: what each of its backward passes found there.

    Where one of them found it cleared, nothing was: in a GAN the generator's loss adds to the critic's gradients of
    the step before, which are cleared only then. `found` is None where nothing was, else float64 on its device, 1
    where every pass met an element that is not zero.
    """

    def __init__(self) -> None:
        self.found: Tensor | None = None
        self._has_begun = False

    def begin(self, parameter: Tensor) -> None:
        """A backward pass is about to add to this parameter's gradient."""
        if self._has_begun and self.found is None:
            return  # it is this window's own
        now = residue_of(parameter)
        self.found = now if self.found is None or now is None else self.found * now
        self._has_begun = True


def residue_of(parameter: Tensor) -> Tensor | None:
    """Whether a backward pass that is about to add to this parameter's gradient finds anything in it; None without one.

    One of its first elements that is not zero; NaN is not. Float64, on its device; no synchronisation.
    """
    grad = None if parameter.grad is None else local(parameter.grad)
    if grad is None or not is_plain(grad) or grad.layout is not torch.strided:
        return None
    with torch.no_grad():
        return grad.flatten()[:RESIDUE].ne(0).any().to(torch.float64)


def _held_by(optimizer: weakref.ref[Optimizer], key: int) -> Tensor | None:
    """The parameter of this identity, if the optimizer still holds it."""
    alive = optimizer()
    groups = alive.param_groups if alive is not None else ()
    return next((p for group in groups for p in group["params"] if id(p) == key), None)


def _accumulating(
    watcher: weakref.ref[Watcher], index: int, finding: Callable[[], Tensor | None], *_: object
) -> None:
    alive, its = watcher(), finding()
    if alive is not None and its is not None:
        alive.accumulating(index, its)


def _accumulated(watcher: weakref.ref[Watcher], index: int, parameter: Tensor) -> None:
    alive = watcher()
    if alive is not None:
        alive.accumulated(index, parameter)
