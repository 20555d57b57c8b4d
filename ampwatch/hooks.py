"""What all observers share: an observation, a hook that cannot hurt, and a look at many tensors at once."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .guard import guard
from .internals import is_captured, is_compiled

Numbers: TypeAlias = npt.NDArray[np.float64]
Decode: TypeAlias = Callable[[Numbers], dict[str, Any]]

DTYPES: Final = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)


@dataclass(frozen=True)
class Observation:
    """What an observer has seen, as numbers on the device and the function that reads them.

    Arguments:
        type: of the event that it becomes (docs/format.md).
        values: one-dimensional float64 on the device; may be empty.
        decode: pure; from the values in host memory to the data of the event.
    """

    type: str
    values: Tensor
    decode: Decode


class Hook:
    """A hook of ours on somebody's module or parameter: returns None, and keeps what it raises to itself.

    It does nothing while a graph is compiled or captured. What it feeds belongs to this process and this model: in a
    deep copy of a module it takes itself off at the first call, and in a pickled one stands something of Python's own
    that does nothing, so that a saved model loads where there is no ampwatch.
    """

    __torch_unserializable__ = (
        True  # without it torch warns where a tensor that has hooks is saved or sent away
    )

    __slots__ = ("_guard", "_see")  # there may be one on each of thousands of parameters

    def __init__(self, where: str, see: Callable[..., None]) -> None:
        self._see = see
        self._guard = guard(where)

    def __call__(self, *arguments: Any) -> None:
        """Hand the hook's arguments on."""
        if is_compiled():
            return
        with self._guard:
            if not is_captured():
                self._see(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return leave

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (nullcontext(), "__exit__")  # takes whatever it is given, and answers None


def leave(module: nn.Module, *_arguments: Any) -> None:
    """What a hook is in a deep copy of a module: at its first call it is taken off."""
    if is_compiled():
        return
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook is leave]:
            del hooks[key]
    if isinstance(vars(module).get(_Unscripted.ASKED), partial):
        del vars(module)[_Unscripted.ASKED]


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks may be put on its forward pass: one that TorchScript has compiled refuses each."""
    return not isinstance(module, torch.jit.RecursiveScriptModule)  # type: ignore[attr-defined]


def before_forward(module: nn.Module, hook: Callable[..., None], **how: bool) -> Handle:
    """`register_forward_pre_hook` of a hook of ours; TorchScript may compile the module all the same."""
    return _ModuleHandle(module, module.register_forward_pre_hook(hook, **how))


def after_forward(module: nn.Module, hook: Callable[..., None], **how: bool) -> Handle:
    """`register_forward_hook`, as `before_forward`."""
    return _ModuleHandle(module, module.register_forward_hook(hook, **how))


class _ModuleHandle:
    """A hook of ours on a module, which can be taken off."""

    def __init__(self, module: nn.Module, handle: RemovableHandle) -> None:
        self._module, self._handle = weakref.ref(module), handle
        unscripted = vars(module).setdefault(_Unscripted.ASKED, _Unscripted(module))
        if isinstance(unscripted, _Unscripted):  # the user may have one of his own
            unscripted.handles.add(handle)

    def remove(self) -> None:
        """Take it off."""
        self._handle.remove()
        module = self._module()
        unscripted = None if module is None else vars(module).get(_Unscripted.ASKED)
        if module is not None and isinstance(unscripted, _Unscripted):
            unscripted.handles.discard(self._handle)
            if not unscripted.handles:
                del vars(module)[_Unscripted.ASKED]


class _Unscripted:
    """What TorchScript asks for on a module before it compiles it, and what takes our hooks off then: it refuses each.

    A copy has none of our hooks that could see anything, and needs none of this.
    """

    ASKED: Final = "__prepare_scriptable__"

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.handles: set[RemovableHandle] = set()

    def __call__(self) -> nn.Module:
        module = self._module()
        assert module is not None
        for handle in self.handles:
            handle.remove()
        del vars(module)[self.ASKED]
        of_its_class: Callable[[], nn.Module] = getattr(module, self.ASKED, lambda: module)
        return of_its_class()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[], nn.Module]:
        return partial(_without_leave, cast(nn.Module, memo.get(id(self._module()))))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (cast, None, self._module())


def _without_leave(module: nn.Module) -> nn.Module:
    """A deep copy without what stands in it for our hooks, and without this."""
    leave(module)
    return module


def in_backward() -> bool:
    """Whether this thread is in a backward pass, where checkpointing calls modules once more."""
    return backward_pass() != -1


def backward_pass() -> int:
    """The backward pass that this thread is in, by a number of torch's; -1 where it is in none."""
    return torch._C._current_graph_task_id()


class Handle(Protocol):
    """What takes a hook off."""

    def remove(self) -> None:
        """Take it off."""


class Observer(ABC):
    """Something that looks by hooks, from `arm` to `disarm`; what it has seen is kept until it is armed again."""

    event: ClassVar[str]
    """Type of the event that comes of it."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def arm(self) -> None:
        """Forget what was seen and put the hooks on; nothing if they are on. No synchronisation."""
        if not self._handles:
            self._forget()
            for handle in self._attach():
                self._handles.append(handle)  # one by one: if the next fails, disarm still finds this one

    def disarm(self) -> None:
        """Take all hooks off. No synchronisation."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def hooks(self) -> int:
        """How many hooks `arm` has put on; 0 after `disarm`."""
        return len(self._handles)

    @abstractmethod
    def collect(self) -> Observation | None:
        """What was seen since `arm`, None if nothing was. No synchronisation."""

    @abstractmethod
    def _forget(self) -> None: ...

    @abstractmethod
    def _attach(self) -> Iterator[Handle]: ...


class Announcements:
    """Which hooks were put on and taken off, until it is told; event `observers`.

    Arguments:
        event: records an event that only the host knows of.
    """

    def __init__(self, event: Callable[..., object]) -> None:
        self._event = event
        self._waiting: list[dict[str, Any]] = []

    def add(self, observers: Sequence[str], hooks: int, why: str) -> None:
        """Hooks were put on or taken off.

        Arguments:
            observers: what they are for.
            hooks: how many of them are on now.
            why: as docs/format.md lists.
        """
        self._waiting.append({"observers": list(observers), "hooks": hooks, "why": why})

    def tell(self) -> None:
        """Record what was added since."""
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._event("observers", **data)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a real or complex one in this process's memory: no wrapper, not lazy, not on `meta`."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in DTYPES and not tensor.is_meta


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process: of a DTensor this rank's shard, of a collective under way its result.

    Synchronisation: a collective's result is waited for on the stream, as by the operation that uses it next.
    """
    if hasattr(tensor, "to_local"):
        tensor = cast(Tensor, tensor.to_local())
    return cast(Tensor, tensor.trigger_wait()) if hasattr(tensor, "trigger_wait") else tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The plain tensors in what a module is given or returns, nested in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        if is_plain(value):
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in_all(value.values())
    elif isinstance(value, (tuple, list)):
        yield from _tensors_in_all(value)
    elif is_dataclass(value):
        yield from _tensors_in_all(getattr(value, field.name) for field in fields(value))


def _tensors_in_all(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors_in(value)


@torch.no_grad()
def magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Largest magnitude of each tensor: NaN if it holds NaN, else inf if it holds inf.

    Arguments:
        tensors: plain ones, on any devices.
    Returns: (n,) float64 on the device of `gathered`; 0 for an empty tensor.
    Synchronisation: none.
    """
    return gathered([magnitude(tensor) for tensor in tensors])


def magnitude(tensor: Tensor) -> Tensor:
    """Largest magnitude of one plain tensor, as of `magnitudes`: a scalar on its device."""
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    largest: Tensor = torch.linalg.vector_norm(real, torch.inf)
    return largest


def gathered(parts: Sequence[Tensor]) -> Tensor:
    """Tensors as one float64 vector; no synchronisation.

    It lies on their device: where there are several on the first that is not the CPU, as a copy to the CPU would wait.
    """
    if not parts:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    flat = [part.reshape(-1) for part in parts]
    if len({(part.device, part.dtype) for part in flat}) > 1:
        flat = [part.to(device, torch.float64, non_blocking=True) for part in flat]
    return torch.cat(flat).to(torch.float64)
