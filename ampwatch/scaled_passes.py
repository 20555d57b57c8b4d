"""Whether the gradients that a scaler divides were ever multiplied: which backward passes begin at a scaled loss.

    scaler.scale(loss)         # a number that nobody uses
    loss.backward()            # gradients of the loss as it is
    scaler.step(optimizer)     # divides them by the scale: they are 2^16 times too small from the first step on

No number shows it, as there never was another to compare it with. So every scaled loss has a hook, which is called
as a backward pass comes through it. A gradient that was accumulated in a window before any did cannot hold the scale.
One that comes after may, also of a pass that begins elsewhere: chunks that are taken up one by one from the gradient
of a scaled loss, as in contrastive training, are healthy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor

from .hooks import Hook, backward_pass

AT_FIRST: Final = 64  # windows that are all looked at …
LOOK_EVERY: Final = 16  # … and then two of so many: a hook costs about as much as an operation


@dataclass
class _Fed:
    """What a backward pass has left in one gradient of an optimizer."""

    is_unscaled: bool = False
    left: tuple[int, int] | None = None  # the gradient, and how often it was written to
    in_a_row: int = 0  # windows that were stepped so …
    windows: int = 0  # … and all of them


class ScaledPasses:
    """Host only, and of the windows from one update to the next. Its hooks answer None, and the loss is torch's own."""

    def __init__(self) -> None:
        self._hook = Hook("scaler.scaled_backward", partial(_begun, weakref.ref(self)))
        self._begun: set[int] = set()  # backward passes that came through a scaled loss
        self._awaited = False
        self._is_known = True
        self._windows = 0
        self._fed: dict[int, _Fed] = {}

    def scaled(self, scaled: Sequence[Tensor], *, is_known: bool) -> None:
        """These are what scale() has answered.

        Arguments:
            is_known: whether these are all; of a lazy iterable nothing is seen.
        """
        self._is_known = self._is_known and is_known and self._looks
        if not self._looks:
            return
        for loss in scaled:
            if loss.requires_grad:
                self._awaited = True
                loss.register_hook(self._hook)  # type: ignore[no-untyped-call]

    @property
    def are_used(self) -> bool:
        """Whether a backward pass has come through a scaled loss of this window, or may have."""
        return bool(self._begun) or not self._is_known

    @property
    def adds_unscaled(self) -> bool:
        """Whether the backward pass under way came through no scaled loss of this window, and one before it did."""
        return bool(self._begun) and self._is_known and backward_pass() not in self._begun

    @property
    def _looks(self) -> bool:
        """Whether this window is looked at: it takes two in a row."""
        return self._windows < AT_FIRST or self._windows % LOOK_EVERY < 2

    def begun(self) -> None:
        """A backward pass comes through a scaled loss."""
        self._begun.add(backward_pass())

    def accumulating(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass is about to add to this gradient: if somebody wrote to it since the last, it may be cleared."""
        fed = self._fed.setdefault(optimizer, _Fed())
        fed.is_unscaled = fed.is_unscaled and fed.left == _mark(parameter)

    def accumulated(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass has added to it."""
        fed = self._fed.setdefault(optimizer, _Fed())
        fed.is_unscaled = fed.is_unscaled or not self._begun
        fed.left = _mark(parameter)

    def stepped_outside(self, optimizer: int) -> None:
        """An optimizer was stepped by itself: what its gradients were made of is its own affair."""
        self._fed.pop(optimizer, None)

    def unscaled(self, optimizer: int) -> bool:
        """Its gradients are divided by the scale: whether some were never multiplied, twice in a row or for the third time."""
        fed = self._fed.setdefault(optimizer, _Fed())
        is_unscaled = fed.is_unscaled and self._awaited and self._is_known
        fed.in_a_row = fed.in_a_row + 1 if is_unscaled else 0
        fed.windows += is_unscaled
        return is_unscaled and (fed.in_a_row > 1 or fed.windows > 2)

    def updated(self) -> None:
        """A window has ended."""
        self._begun.clear()
        self._awaited = False
        self._is_known = True
        self._windows += 1
        for fed in self._fed.values():
            fed.is_unscaled = False


def _mark(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _begun(passes: weakref.ref[ScaledPasses], *_: object) -> None:
    alive = passes()
    if alive is not None:
        alive.begun()
