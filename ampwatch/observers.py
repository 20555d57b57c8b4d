"""Observers: what hooks see of a training, each bounded in time and removable (docs/numerics.md, section 4).

    probe = OriginProbe([(0, weight), (1, bias)])
    probe.arm()
    ...                      # forward and backward
    probe.disarm()
    probe.collect()          # an Observation: numbers on the device, and how to read them

No hook synchronises, holds a lock or raises; a model with hooks on can be copied and saved.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .finite_check import FiniteCheck
from .forward_search import ForwardSearch
from .hooks import (
    Handle,
    Hook,
    Numbers,
    Observation,
    Observer,
    before_forward,
    gathered,
    is_plain,
    local,
    magnitude,
    takes_hooks,
    tensors_in,
)
from .stats.layout import HIST_LOG2_MIN, SCALARS, WIDTH
from .stats.reference import statistics

__all__ = [
    "AutocastProbe",
    "BackwardOrder",
    "FiniteCheck",
    "ForwardSearch",
    "LocalGradients",
    "Observation",
    "OriginProbe",
    "ReplicaProbe",
]

AUTOCAST_DEVICES: Final = (
    "cuda",
    "cpu",
    "mps",
    "xpu",
    "xla",
    "hpu",
    "mtia",
)  # for which a loop may turn it on
ENOUGH_FOR_FLOAT16: Final = 64  # non-zero finite elements
ENOUGH_FOR_BFLOAT16: Final = 4  # normal float16 numbers; each is on bfloat16's grid by chance once in 8
_FINER_IN_BFLOAT16: Final = slice(-24 - HIST_LOG2_MIN, -18 - HIST_LOG2_MIN)  # bins of 2^-24 to 2^-18


class _FirstAccumulations(Observer):
    """Looks at each parameter when its gradient is accumulated for the first time after `arm`.

    Arguments:
        params: parameters with the ids of their tensors. Those that need no gradient are left out; `arm` lets go of
            all.
    """

    def __init__(self, params: Sequence[tuple[int, Tensor]]) -> None:
        super().__init__()
        self._params = list(params)
        self._seen: dict[int, Tensor] = {}

    def _forget(self) -> None:
        self._seen = {}

    def _attach(self) -> Iterator[Handle]:
        where = f"observers.{type(self).__name__}"
        params, self._params = (
            self._params,
            [],
        )  # hooks are given them: none is kept alive by what waits for it
        for tensor, param in params:
            if param.requires_grad and param.is_leaf:
                hook = Hook(where, partial(self._accumulated, tensor))
                yield param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _accumulated(self, tensor: int, param: Tensor) -> None:
        if tensor not in self._seen and param.grad is not None:
            self._seen[tensor] = self._look_at(local(param.grad))

    @abstractmethod
    def _look_at(self, grad: Tensor) -> Tensor:
        """What is kept of a gradient."""


class OriginProbe(_FirstAccumulations):
    """In which format each gradient was computed, told by the grid that its values lie on; event `origin`.

    It must see a gradient before anything is added to it or averaged: arm it while gradients are None or zero.
    Each parameter costs one statistics pass.
    """

    event = "origin"

    def collect(self) -> Observation | None:
        """What was seen so far, None if nothing was."""
        if not self._seen:
            return None
        return Observation(
            "origin", gathered(list(self._seen.values())), partial(origins_in, list(self._seen))
        )

    def _look_at(self, grad: Tensor) -> Tensor:
        return statistics(grad)


def origins_in(tensors: Sequence[int], numbers: Numbers) -> dict[str, Any]:
    """Data of an `origin` event, of tensors and their statistics."""
    rows = numbers.reshape(len(tensors), WIDTH)
    return {"origins": {str(tensor): _origin(row) for tensor, row in zip(tensors, rows, strict=True)}}


def _origin(row: Numbers) -> str:
    """The 16-bit format that every element fits and the other one would have been seen to miss."""
    counts = dict(zip(SCALARS, row.tolist(), strict=False))
    hist = row[len(SCALARS) :]
    some = counts["numel"] - counts["n_inf"] - counts["n_nan"] - counts["n_zero"]
    # Below 2^-18 bfloat16 has the finer grid: so many elements on float16's cannot have come from it.
    is_no_bfloat16 = counts["n_offgrid_bf16"] or hist[_FINER_IN_BFLOAT16].sum() >= ENOUGH_FOR_FLOAT16
    if some >= ENOUGH_FOR_FLOAT16 and not counts["n_offgrid"] and is_no_bfloat16:
        return "float16"
    # Below 2^-16 whatever is on float16's grid is on bfloat16's too, which tells nothing.
    is_no_float16 = counts["n_offgrid"] or some - counts["n_subnormal"] >= ENOUGH_FOR_BFLOAT16
    if not counts["n_offgrid_bf16"] and is_no_float16:
        return "bfloat16"
    return "unknown"


class BackwardOrder(_FirstAccumulations):
    """The order in which gradients are accumulated, layers nearest the loss first; event `backward_order`."""

    event = "backward_order"

    def collect(self) -> Observation | None:
        """The order so far, None if no gradient was accumulated."""
        if not self._seen:
            return None
        data = {"tensors": list(self._seen)}
        return Observation("backward_order", gathered([]), lambda _: data)

    def _look_at(self, grad: Tensor) -> Tensor:
        return grad.new_empty(0)


class LocalGradients(Observer):
    """Whether this rank's own gradients are finite, before those of others are added; event `local_gradients`.

    A parameter's hook is given what one backward pass adds to its gradient. DDP reduces after that, also where it
    reduces each of several passes: so each is looked at, and not what they add up to.

    Arguments:
        params: parameters with the ids of their tensors; each costs one read of its gradient.
    """

    event = "local_gradients"

    def __init__(self, params: Sequence[tuple[int, Tensor]]) -> None:
        super().__init__()
        self._params = list(params)
        self._largest: dict[int, Tensor] = {}

    def restart(self) -> None:
        """What was seen so far is another stream's."""
        self._forget()

    def collect(self) -> Observation | None:
        """What was seen so far, None if nothing was."""
        if not self._largest:
            return None
        return Observation(
            "local_gradients", gathered(list(self._largest.values())), partial(_locals, list(self._largest))
        )

    def _forget(self) -> None:
        self._largest = {}

    def _attach(self) -> Iterator[Handle]:
        params, self._params = self._params, []
        for tensor, param in params:
            if param.requires_grad and param.is_leaf:
                hook = Hook("observers.LocalGradients", partial(self._see, tensor))
                yield param.register_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _see(self, tensor: int, grad: Tensor) -> None:
        its = local(grad)
        if is_plain(its) and its.layout is torch.strided:
            largest, before = magnitude(its), self._largest.get(tensor)
            self._largest[tensor] = largest if before is None else torch.maximum(before, largest)  # keeps NaN


def _locals(tensors: Sequence[int], largest: Numbers) -> dict[str, Any]:
    broken = [
        tensor for tensor, is_finite in zip(tensors, np.isfinite(largest), strict=True) if not is_finite
    ]
    return {"tensors": list(tensors), "nonfinite": broken}


class AutocastProbe(Observer):
    """The dtype of autocast inside the forward pass, which cannot be read at `scale()`; event `autocast`.

    Each leaf module is looked at once. The first that runs under autocast settles it: one that a model keeps in
    float32 does not speak for the others.
    """

    event = "autocast"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._seen: dict[str, Any] | None = None
        self._settled = False
        self._has_halves = False
        self._to_see: dict[nn.Module, Handle] = {}

    def collect(self) -> Observation | None:
        """What was seen so far, None if no leaf module was called."""
        if self._seen is None:
            return None
        data = self._seen
        return Observation("autocast", gathered([]), lambda _: data)

    def _forget(self) -> None:
        self._seen, self._settled, self._has_halves, self._to_see = None, False, False, {}

    def _attach(self) -> Iterator[Handle]:
        for module in _leaves(self._model):
            handle = before_forward(module, Hook("observers.AutocastProbe", self._see))
            self._to_see[module] = handle
            yield handle

    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module not in self._to_see or self._settled:  # DataParallel calls copies of the modules
            return
        self._to_see.pop(module).remove()
        tensors = (*tensors_in(args), *module.parameters())
        device = next((t.device.type for t in tensors), "cpu")
        self._has_halves = self._has_halves or any(t.dtype is torch.float16 for t in tensors)
        self._settled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if self._settled else torch.float32
        by_hand = self._has_halves and not self._settled
        self._seen = {"dtype": str(dtype).removeprefix("torch."), "device": device, "by_hand": by_hand}
        self._seen["elsewhere"] = None if self._settled else _autocast_elsewhere()


def _autocast_elsewhere() -> str | None:
    """A type of device for which autocast is on, asked where it is not on for the one that computes."""
    return next((type for type in AUTOCAST_DEVICES if torch.is_autocast_enabled(type)), None)


class ReplicaProbe(Observer):
    """Of which parameters this rank has the gradients that another has too, by DistributedDataParallel; event `replicas`.

    It averages them over its process group, of which the first rank's are then as good as any. A wrapper of the model,
    which is none of its modules, is seen while it calls them.

    Arguments:
        model: whose first forward pass tells.
        index: the index of a parameter in the records.
    """

    event = "replicas"

    def __init__(self, model: nn.Module, index: Callable[[Tensor], int]) -> None:
        super().__init__()
        self._model, self._index = model, index
        self._called = False
        self._wrappers: set[DistributedDataParallel] = set()

    def collect(self) -> Observation | None:
        """The parameters, without data where there are none; None if no leaf module was called."""
        if not self._called:
            return None
        self._wrappers.update(m for m in self._model.modules() if isinstance(m, DistributedDataParallel))
        others = [wrapper for wrapper in self._wrappers if wrapper.process_group.rank() > 0]
        copies = {self._index(p) for wrapper in others for p in _averaged(wrapper)}
        firsts = {torch.distributed.get_global_rank(wrapper.process_group, 0) for wrapper in others}
        first = firsts.pop() if len(firsts) == 1 else None
        data = {"tensors": sorted(copies), "first": first} if copies else {}
        return Observation("replicas", gathered([]), lambda _: data)

    def _forget(self) -> None:
        self._called, self._wrappers = False, set()

    def _attach(self) -> Iterator[Handle]:
        for module in _leaves(self._model):
            yield before_forward(module, Hook("observers.ReplicaProbe", self._see))

    def _see(self, *_: object) -> None:
        self._called = True
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None:
            self._wrappers.add(wrapper)


def _averaged(wrapper: DistributedDataParallel) -> Iterator[Tensor]:
    """The parameters whose gradients it averages over all of its group; none where steps are local on purpose."""
    if any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in wrapper._comm_hooks):
        return
    for name, parameter in wrapper.module.named_parameters():
        if parameter.requires_grad and name not in wrapper.parameters_to_ignore:
            yield parameter


def _leaves(model: nn.Module) -> Iterator[nn.Module]:
    """Modules without modules inside; none of what is compiled: it takes no hooks, or is compiled anew as they go."""
    compiled = {part for module in model.modules() if _is_compiled(module) for part in module.modules()}
    return (m for m in model.modules() if m not in compiled and next(m.children(), None) is None)


def _is_compiled(module: nn.Module) -> bool:
    is_wrapped = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    return is_wrapped or not takes_hooks(module)
