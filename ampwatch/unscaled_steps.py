"""Steps that an optimizer of the scaler takes by itself, with gradients of a loss that was never scaled.

A phase in float32 is healthy; one in float16 loses what underflows. The grid that gradients lie on tells (docs/numerics.md,
section 4), as long as nothing was added to them and they were not clipped. So they are looked at as the optimizer has
stepped, and from the first such step on also as a backward pass leaves them, before the loop can have touched them.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .hooks import Hook, Numbers, Observation, gathered, is_plain, local
from .observers import origins_in
from .protocol import Protocol
from .stats.layout import SCALARS, WIDTH
from .stats.reference import statistics
from .strangers import Look

LOOKS: Final = 8  # steps of an optimizer
TENSORS: Final = 2  # of it that are looked at, at a statistics pass each
UNSCALED: Final = (
    64.0  # a factor, beyond what a clip takes, by which a loop makes gradients smaller that it scaled by hand
)


class UnscaledSteps:
    """Of one scaler. Training thread only; no synchronisation.

    Arguments:
        protocol: knows whether a loss of the window was scaled.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._looks: dict[int, int] = {}
        self._seen: dict[int, dict[int, Tensor]] = {}  # statistics by tensor, of the window
        self._handles: dict[int, list[RemovableHandle]] = {}

    def stepped(
        self, optimizer: int, numbered: Iterable[tuple[int, Tensor]], born: Container[int]
    ) -> Observation | None:
        """It has stepped so: event `call_fault` if its gradients were computed in float16; None where none is there.

        Arguments:
            numbered: its parameters with the ids of their tensors.
            born: the tensors whose gradients are known to be computed in float16 otherwise.
        """
        looks = self._looks.get(optimizer, 0)
        early = self._seen.pop(optimizer, {})
        if looks >= LOOKS:
            self._forget(optimizer)
            return None
        its = list(islice(((t, p) for t, p in numbered if t in born and p.grad is not None), TENSORS))
        late = {t: statistics(local(p.grad)) for t, p in its if p.grad is not None and is_plain(p.grad)}
        seen = late | early
        if not seen:
            return None
        self._looks[optimizer] = looks + 1
        self._look_early(optimizer, its)
        order = self._protocol.window.order
        fault = {"fault": "unscaled_step", "optimizer": optimizer, "order": order, "raised": False}
        return Observation("call_fault", gathered(list(seen.values())), partial(_fault_in, fault, len(seen)))

    def stranger(self, optimizer: Optimizer, looks: Sequence[Look]) -> Observation:
        """One that no scaler steps has stepped so: the same event, if the loop did not unscale gradients by hand."""
        order, name = self._protocol.window.order, type(optimizer).__name__
        fault = {
            "fault": "unscaled_step",
            "optimizer": None,
            "class": name,
            "order": order,
            "raised": False,
        }
        seen = gathered([*(look.left for look in looks), *(look.taken for look in looks)])
        return Observation("call_fault", seen, partial(_fault_of_stranger, fault))

    def accumulated(self, optimizer: int, tensor: int, parameter: Tensor) -> None:
        """A backward pass has added to this gradient: the first of a window without a scaled loss is looked at."""
        seen = self._seen.setdefault(optimizer, {})
        grad = parameter.grad
        if self._protocol.window.losses == 0 and tensor not in seen and grad is not None and is_plain(grad):
            seen[tensor] = statistics(local(grad))

    def updated(self) -> None:
        """A window has ended."""
        self._seen.clear()

    def close(self) -> None:
        """Take every hook off."""
        for optimizer in list(self._handles):
            self._forget(optimizer)

    def _look_early(self, optimizer: int, numbered: Iterable[tuple[int, Tensor]]) -> None:
        if optimizer in self._handles:
            return
        handles = self._handles[optimizer] = []
        for tensor, parameter in numbered:
            if parameter.is_leaf and parameter.requires_grad:
                hook = Hook("scaler.unscaled", partial(_accumulated, weakref.ref(self), optimizer, tensor))
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _forget(self, optimizer: int) -> None:
        for handle in self._handles.pop(optimizer, []):
            handle.remove()


def _accumulated(steps: weakref.ref[UnscaledSteps], optimizer: int, tensor: int, parameter: Tensor) -> None:
    alive = steps()
    if alive is not None:
        alive.accumulated(optimizer, tensor, parameter)


def _fault_of_stranger(fault: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    left, taken = numbers.reshape(2, -1, WIDTH)
    largest = SCALARS.index("max_abs")
    is_unscaled = taken[:, largest].max() * UNSCALED < left[:, largest].max()
    return {} if is_unscaled else _fault_in(fault, len(left), left)


def _fault_in(fault: dict[str, Any], tensors: int, numbers: Numbers) -> dict[str, Any]:
    return fault if "float16" in origins_in(range(tensors), numbers)["origins"].values() else {}
