"""Modules, parameters and buffers by the names that their author knows, without the segments that wrappers put in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .ephemerons import Ephemerons
from .hooks import Hook, is_plain

Part = TypeVar("Part")

FIRST: Final = 8  # weights by which it is known whether a model changes
_OF_WRAPPERS: Final = frozenset(("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"))


class Name(NamedTuple):
    """What a model calls a parameter."""

    name: str
    module: str
    module_type: str


def weakly(model: nn.Module | None) -> Callable[[], nn.Module | None]:
    """The model for as long as somebody keeps it."""
    return (lambda: None) if model is None else weakref.ref(model)


class Models:
    """The model of a scaler, which may outlive many: it is kept while one of the optimizers that were met is.

    The user may keep its parts only, as where two networks were put into one list for the scaler to see.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = weakly(model)
        self._until_met = model
        self._kept = Ephemerons[Optimizer, nn.Module]()
        self._versions: list[int] = []  # of its first weights, as they were when it was last asked
        self._updates = 0
        self._waiting: dict[int, RemovableHandle] = {}  # gradients that the first update came before

    def meet(self, optimizer: Optimizer) -> None:
        """The scaler has met an optimizer."""
        model, self._until_met = self.model(), None
        if model is not None:
            self._kept[optimizer] = model

    def updated(self) -> None:
        """An update has ended a window. After the first, gradients of no optimizer that was met wait for one.

        A hook on each tells whether another backward pass comes, up to the next update: by then those are met.
        """
        self._updates += 1
        self.close()
        model = self.model() if self._updates == 1 else None
        if model is None:
            return
        met = {id(p) for optimizer in self._kept for group in optimizer.param_groups for p in group["params"]}
        hook = Hook("scaler.waiting", partial(_fed, weakref.ref(self)))
        for p in model.parameters():
            if p.grad is not None and id(p) not in met and p.is_leaf and p.requires_grad:
                self._waiting[id(p)] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def fed(self, parameter: Tensor) -> None:
        """A backward pass has added to a gradient that waits."""
        if (handle := self._waiting.pop(id(parameter), None)) is not None:
            handle.remove()

    def has_waiting(self, optimizer: Optimizer) -> bool:
        """Whether gradients of this optimizer are those that the first update came before, one window later."""
        parameters = (p for group in optimizer.param_groups for p in group["params"]) if self._waiting else ()
        return any(id(p) in self._waiting and p.grad is not None for p in parameters)

    def close(self) -> None:
        """Take every hook off."""
        for handle in self._waiting.values():
            handle.remove()
        self._waiting.clear()

    def has_moved(self) -> bool | None:
        """Whether one of its first weights was written to since this was asked before; None without a model."""
        model = self.model()
        if model is None:
            return None
        trained = (p for p in model.parameters() if p.requires_grad and is_plain(p))
        before, self._versions = self._versions, [p._version for p in islice(trained, FIRST)]
        return bool(before) and before != self._versions


def _fed(models: weakref.ref[Models], parameter: Tensor) -> None:
    alive = models()
    if alive is not None:
        alive.fed(parameter)


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's modules as `named_modules()` gives them; a wrapper has the name of what it wraps, and comes first."""
    return _renamed(model, model.named_modules())


def parameters_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters."""
    return _renamed(model, model.named_parameters())


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's buffers."""
    return _renamed(model, model.named_buffers())


def names_of(model: nn.Module | None) -> dict[int, Name]:
    """What the model calls its parameters, by their identity."""
    if model is None:
        return {}
    types = {name: type(module).__name__ for name, module in modules_of(model)}
    named = {}
    for name, parameter in parameters_of(model):
        module = name.rpartition(".")[0]
        named[id(parameter)] = Name(name, module, types[module])
    return named


def _renamed(model: nn.Module, parts: Iterable[tuple[str, Part]]) -> Iterator[tuple[str, Part]]:
    plain = _plain_name(model)
    return ((plain(name), part) for name, part in parts)


def _plain_name(model: nn.Module) -> Callable[[str], str]:
    is_replicated = isinstance(model, (DataParallel, DistributedDataParallel))

    def plain(name: str) -> str:
        segments = name.split(".")
        if is_replicated and segments[0] == "module":
            del segments[0]
        return ".".join(segment for segment in segments if segment not in _OF_WRAPPERS)

    return plain
