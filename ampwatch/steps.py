"""Every step of every optimizer of the process, by one hook of torch's that stays.

A hook on an optimizer would have to come off when its watch ends. The collector may end a watch at any allocation,
so also while torch goes through the hooks of a step: Python then raises, and that into the training.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Final, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .guard import guard
from .hooks import Hook


class Listener(Protocol):
    """Who is told. It is held weakly."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Any optimizer of the process has stepped."""


_listeners: Final[weakref.WeakKeyDictionary[Listener, None]] = weakref.WeakKeyDictionary()  # in their order
_GUARD: Final = guard("steps.told")  # of each: where one fails, the next is told all the same


def listen(listener: Listener) -> None:
    """Tell it of every step from now on, until it is gone or wants no more."""
    _listeners[listener] = None
    _watch_every_step()


def listen_no_more(listener: Listener) -> None:
    """Tell it of no step from now on."""
    _listeners.pop(listener, None)


@cache
def _watch_every_step() -> None:
    register_optimizer_step_post_hook(Hook("steps.stepped", _stepped))


def _stepped(optimizer: Optimizer, *_: object) -> None:
    # A list, as other threads and the collector may change what they are of.
    for listener in _listeners.keyrefs():
        alive = listener()
        if alive is not None:
            with _GUARD:
                alive.stepped(optimizer)
