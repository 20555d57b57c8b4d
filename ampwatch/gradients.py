"""The gradients of an optimizer, attempt by attempt: which there are, of which tensors, on which devices.

This runs at every attempt, for a thousand tensors and more. So it asks each question of all of them by a function of
C, and keeps what follows from the answers for as long as they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import NoneType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .coalescing import Sum, coalesce
from .hooks import DTYPES, local
from .internals import Replicas
from .names import Name
from .registry import Registry
from .stats.dense import Dense

ROTATING: Final = 2  # parameters
_PLAIN: Final = frozenset((Tensor,))
_STRIDED: Final = frozenset((torch.strided,))
_REAL: Final = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_DEVICES: Final = frozenset(("cpu", "cuda"))
_params = itemgetter("params")
_grad, _dtype, _device, _layout = map(attrgetter, ("grad", "dtype", "device", "layout"))
_is_nested = attrgetter("is_nested")


class Gradients(NamedTuple):
    """What the statistics pass is given.

    `parameters` are those whose gradient has statistics, in torch's order, of `with_grad` that have one. `by_device`
    holds the gradients as torch checks them, a list for each device; `tensors` are their indices, (n,) int64, over all
    lists. `usual` says that torch takes each of them as it lies and refuses none, so that a kernel may unscale them in
    its place. `sums` are sparse ones that torch adds up by index first.
    """

    parameters: list[Tensor]
    by_device: list[list[Tensor]]
    tensors: npt.NDArray[np.int64]
    usual: bool
    with_grad: int
    sums: tuple[Sum, ...] = ()


class GradientList:
    """Lists the gradients of one optimizer, and keeps its parameters alive. Synchronises with no device.

    Arguments:
        registry: knows the indices of tensors.
        names: what the model calls its parameters, by identity; asked when there are new ones.
    """

    def __init__(self, registry: Registry, names: Callable[[], Mapping[int, Name]]) -> None:
        self._registry, self._names = registry, names
        self._parameters: list[Tensor] = []
        self._only_tensors = True
        self._negated = False
        self._tensors = np.empty(0, np.int64)
        self._places: list[Sequence[int]] = []  # in the list of all, device by device
        self._turn = 0

    def some(self) -> list[Tensor]:
        """The last of the parameters that had a gradient, which is nearest the loss, and after each `of` two others."""
        its, start = self._parameters, (self._turn - 1) * ROTATING
        others = len(its) - 1
        places = [-2 - (start + i) % others for i in range(min(ROTATING, others))]
        return [*its[-1:], *(its[place] for place in places)]

    def of(self, optimizer: Optimizer, *, may_be_float16: bool, torchs: Replicas | None = None) -> Gradients:
        """The gradients as they are now.

        Arguments:
            may_be_float16: torch allows float16 gradients.
            torchs: what torch's method will do, if that follows; sparse float16 ones are coalesced in its place.
        """
        self._turn += 1
        parameters: list[Tensor] = list(chain.from_iterable(map(_params, optimizer.param_groups)))
        grads: list[Tensor] = list(map(_grad, parameters))
        if NoneType in set(map(type, grads)):
            parameters = [p for p, grad in zip(parameters, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        with_grad = len(grads)
        dense = Dense.of(grads)
        usual = dense is not None and (may_be_float16 or torch.float16 not in dense.dtypes)
        sums: tuple[Sum, ...] = ()
        if dense is None:
            usual = _usual(grads, may_be_float16)
            if not usual:
                if torchs is not None and may_be_float16:
                    sums = coalesce(parameters, torchs.coalesced)
                parameters, grads = _with_statistics(parameters)
        places: list[Sequence[int]] = [range(len(grads))] if dense else _places(map(Tensor.get_device, grads))
        same = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        if not same:
            # Asking each at every attempt would take as long as all else; torch's op refuses what is negated as it is read.
            self._negated = any(map(Tensor.is_neg, grads))
        if not same or places != self._places:
            self._arrange(optimizer, parameters, places)
        lists = [dense or grads] if len(places) == 1 else [[grads[i] for i in part] for part in places]
        usual = usual and self._only_tensors and not self._negated
        return Gradients(parameters, lists, self._tensors, usual, with_grad, sums)

    def _arrange(self, optimizer: Optimizer, parameters: list[Tensor], places: list[Sequence[int]]) -> None:
        indices = self._registry.introduce(optimizer, parameters, self._names())
        self._tensors = np.array(indices, np.int64)[list(chain.from_iterable(places))]
        self._only_tensors = all(issubclass(kind, Tensor) for kind in set(map(type, parameters)))
        self._parameters, self._places = parameters, places


def _places(devices: Iterable[int]) -> list[Sequence[int]]:
    places: dict[int, list[int]] = {}
    for place, device in enumerate(devices):
        places.setdefault(device, []).append(place)
    return list(places.values())


def _usual(grads: Sequence[Tensor], may_be_float16: bool) -> bool:
    """Whether torch takes them all as they lie, on CPUs and GPUs, and raises for none: it would of memory that repeats."""
    if not (_PLAIN.issuperset(map(type, grads)) and _STRIDED.issuperset(map(_layout, grads))):
        return False
    dtypes = set(map(_dtype, grads))
    return (
        dtypes <= _REAL
        and (may_be_float16 or torch.float16 not in dtypes)
        and {device.type for device in set(map(_device, grads))} <= _DEVICES
        and not any(map(_is_nested, grads))
        and (all(map(Tensor.is_contiguous, grads)) or not any(map(_repeats, grads)))
    )


def _repeats(grad: Tensor) -> bool:
    return not grad.is_contiguous() and 0 in grad.stride()


def _with_statistics(parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Of parameters with gradients of any kind those that have statistics; and the gradients, as torch checks them."""
    checked = ((p, _checked(p.grad)) for p in parameters if p.grad is not None)
    pairs = [(p, grad) for p, grad in checked if grad is not None]
    return [p for p, _ in pairs], [grad for _, grad in pairs]


def _checked(grad: Tensor) -> Tensor | None:
    """What torch checks: of a sparse gradient the values, of a DTensor the rank's own shard.

    None where there are no numbers to look at: on `meta`; of a subclass that only wraps others; and of a kind that
    torch refuses, as quantized and nested ones.
    """
    if grad.is_sparse:
        return grad._values()
    grad = local(grad)
    is_known = grad.layout is torch.strided and grad.dtype in DTYPES and not (grad.is_meta or grad.is_nested)
    return grad if is_known and not is_traceable_wrapper_subclass(grad) else None
