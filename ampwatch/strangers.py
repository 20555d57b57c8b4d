"""Optimizers that the scaler never steps: whether their gradients are scaled, or are float16 and should have been.

Many are of no concern: another model's, or a second one in float32 whose loss is never scaled. So the first step of
one only makes it a suspect. From then on it is looked at which backward passes add to its gradients, by the number
that autograd gives each pass: one that comes through a scaled loss leaves gradients that are scaled, and proves it. Of
any other pass a few gradients are read, which tell float16 by its grid (docs/numerics.md, section 4), unless another
scaler steps it. A suspect of which neither is seen in a few steps is cleared, and costs nothing any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from . import internals
from .hooks import Announcements, Hook, backward_pass, is_plain, local
from .stats.reference import statistics
from .steps import listen, listen_no_more

CLEARED_AFTER: Final = 4  # steps of a suspect without a scaled gradient
MATRICES: Final = (
    4  # parameters of a suspect that are read, beside the first: those that a layer in float16 may hold
)


class Look(NamedTuple):
    """The statistics of one gradient as backward has left it, and as the optimizer has stepped with it."""

    left: Tensor
    taken: Tensor


class Watcher(Protocol):
    """Who is told. It is held weakly: its hooks end with it."""

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether a scaler of the run steps this optimizer, or is stepping what it is a part of; or the run is over."""

    def unscales(self, parameter: Tensor) -> bool:
        """Whether an optimizer that the scaler has unscaled holds this parameter."""

    def stepped_by_itself(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped outside the scaler with gradients of a scaled loss."""

    def stepped_unscaled(self, optimizer: Optimizer, seen: Sequence[Look]) -> None:
        """One has stepped with gradients of another loss."""


@dataclass
class _Suspect:
    """An optimizer that stepped by itself."""

    is_scaled: bool = False  # a backward pass of a scaled loss has added to its gradients since its last step
    looks: int = 0
    seen: dict[int, Tensor] = field(
        default_factory=dict
    )  # statistics of its gradients since then, by parameter


class Strangers:
    """Tells a watcher of such steps. Host only: it never touches a device.

    Arguments:
        announced: told of hooks on a suspect's parameters.
    """

    def __init__(self, watcher: Watcher, announced: Announcements) -> None:
        self._watcher, self._announced = weakref.ref(watcher), announced
        self._suspects: MutableMapping[Optimizer, _Suspect] = WeakIdKeyDictionary()
        self._cleared: MutableMapping[Optimizer, None] = WeakIdKeyDictionary()
        self._pass = -1  # the newest backward pass through a scaled loss
        self._knows_all = True

    def scaled(self, scaled: Iterable[Tensor], *, is_known: bool = True) -> None:
        """These are what scale() has answered.

        Arguments:
            is_known: whether these are all; of a lazy iterable nothing is seen.
        """
        listen(self)
        self._knows_all = self._knows_all and is_known
        if self._suspects:
            hook = Hook("scaler.strange_backward", partial(_begun, weakref.ref(self)))
            for loss in scaled:
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
            self._let_go(optimizer)
        elif suspect is None:
            self._suspect(watcher, optimizer)
        elif suspect.is_scaled:
            suspect.is_scaled, suspect.looks, suspect.seen = False, 0, {}
            watcher.stepped_by_itself(optimizer)
        else:
            suspect.looks += 1
            seen, suspect.seen = suspect.seen, {}
            if seen and self._knows_all and not internals.in_scaler_step():
                watcher.stepped_unscaled(optimizer, list(_looks(optimizer, seen)))
            if suspect.looks >= CLEARED_AFTER:
                self._let_go(optimizer)
                self._cleared[optimizer] = None

    def begun(self) -> None:
        """A backward pass comes through a scaled loss."""
        self._pass = backward_pass()

    def accumulated(self, suspect: _Suspect, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of this parameter, one of a suspect's."""
        suspect.is_scaled = suspect.is_scaled or backward_pass() == self._pass
        grad, key = parameter.grad, id(parameter)
        if not suspect.is_scaled and key not in suspect.seen and grad is not None and is_plain(grad):
            suspect.seen[key] = statistics(local(grad))

    def _suspect(self, watcher: Watcher, optimizer: Optimizer) -> None:
        """Watch some of its parameters; one that shares the first with an optimizer of ours is a part of that."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        trained = [p for p in parameters if p.grad is not None and p.is_leaf and p.requires_grad]
        if not trained:
            return
        if watcher.unscales(trained[0]):
            self._cleared[optimizer] = None
            return
        suspect = self._suspects[optimizer] = _Suspect()
        hook = Hook("scaler.strange_gradient", partial(_accumulated, weakref.ref(self), weakref.ref(suspect)))
        looked_at = [trained[0], *islice((p for p in trained[1:] if p.dim() > 1), MATRICES)]
        for parameter in looked_at:
            handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
            weakref.finalize(suspect, handle.remove)  # when it is let go, or its optimizer is gone
        self._announced.add(["strangers"], len(looked_at), "stepped_outside")

    def _let_go(self, optimizer: Optimizer) -> None:
        if self._suspects.pop(optimizer, None) is not None:
            self._announced.add(["strangers"], 0, "done")


def _looks(optimizer: Optimizer, seen: Mapping[int, Tensor]) -> Iterator[Look]:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        left, grad = seen.get(id(parameter)), parameter.grad
        if left is not None and grad is not None and is_plain(grad):
            yield Look(left, statistics(local(grad)))


def _begun(strangers: weakref.ref[Strangers], *_: object) -> None:
    alive = strangers()
    if alive is not None:
        alive.begun()


def _accumulated(
    strangers: weakref.ref[Strangers], suspect: weakref.ref[_Suspect], parameter: Tensor
) -> None:
    alive, looked_at = strangers(), suspect()
    if alive is not None and looked_at is not None:
        alive.accumulated(looked_at, parameter)
