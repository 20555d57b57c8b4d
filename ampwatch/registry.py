"""Indices of scalers, optimizers, streams and tensors within one producer, and the events that introduce them.

Nothing here keeps an optimizer or a parameter alive, and an index is never given twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .ephemerons import Ephemerons
from .logbook import Logbook
from .names import Name
from .settings import Settings
from .worker import Source

if TYPE_CHECKING:
    from .diagnosis.findings import Finding
    from .harvest import Steps


Owner: TypeAlias = Optimizer | nn.Module


class Sink(Protocol):
    """What the training side needs of a `Recorder`; tests record into memory."""

    settings: Settings
    finished: bool
    producer: str

    @property
    def predecessor(self) -> Sink | None:
        """What records a training that may be over, while it is open whether this one goes on with it."""

    def event(self, type: str, *, attempt: int = -1, step: int = -1, stream: int = -1, **data: Any) -> None:
        """Record an event."""

    def fault(self, where: str, error: Exception, count: int) -> None:
        """Record a failure of ours."""

    def describe(self, **data: Any) -> None:
        """Add to the data of the `run` event."""

    def next_attempt(self) -> int:
        """Number of the attempt, over all scalers of the producer."""

    def attach(self, source: Source) -> None:
        """Harvest this source from now on."""

    def listen(self, on_finding: Callable[[Finding], object]) -> None:
        """Call this too with each fatal finding."""

    @property
    def logbook(self) -> Logbook:
        """What the user logs."""


@dataclass
class _Entry:
    index: int
    shape: tuple[int, ...] = ()  # what a change of is announced: groups, tensors
    scaler: int | None = None
    steps: Steps | None = None  # of that scaler
    tensors: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Kept:
    """A parameter by its index. It is kept alive, as another may get the address of one that is gone.

    Its owner holds it too, and with the owner it goes. A weak reference would be simpler, but a tensor that has one
    cannot be swapped, as torch does to move a model of DTensors: `Module.to` would raise.
    """

    index: int
    parameter: Tensor


class Registry:
    """The indices that the scalers of one producer share. Whatever gets one is told from others by identity, as torch does.

    Arguments:
        event: records an event.
    """

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        self._users: list[weakref.ref[object]] = []  # what has an index of a scaler
        self._optimizers: MutableMapping[Optimizer, _Entry] = WeakIdKeyDictionary()
        self._introduced = 0
        self._streams: dict[tuple[int, tuple[int, ...]], int] = {}
        self._tensors = Ephemerons[Owner, dict[int, _Kept]]()
        self._next_tensor = 0
        self._storages: set[StorageWeakRef] = (
            set()
        )  # of what was trained, by which it is known without its optimizer
        self.coming_attempt = 0  # the number that the next update() will most likely get

    def new_scaler(self, user: object) -> int:
        """Index of a scaler, or of what stands in its place, that is used for the first time."""
        self._users.append(weakref.ref(user))
        return len(self._users) - 1

    @property
    def has_attempts(self) -> bool:
        """Whether anything was trained."""
        return self.coming_attempt > 0

    @property
    def is_deserted(self) -> bool:
        """Whether nothing is there any more that has trained: neither a scaler, nor an optimizer that was met."""
        return not self._optimizers and all(user() is None for user in self._users)

    def knows(self, owner: Owner) -> bool:
        """Whether one of its parameters has been trained here, or belongs to a model that has."""
        kept = {key for each in self._tensors.values() for key in each}
        return any(id(p) in kept or _storage_of(p) in self._storages for p in _parameters_of(owner))

    def optimizer(self, optimizer: Optimizer) -> int:
        """Index of an optimizer; an `optimizers` event where it is new, or its groups or tensors have changed."""
        entry = self._optimizers.get(optimizer)
        if entry is None:
            entry = self._optimizers[optimizer] = _Entry(self._introduced)
            self._introduced += 1
        shape = tuple(len(group["params"]) for group in optimizer.param_groups)
        if shape != entry.shape:
            entry.shape = shape
            self._event("optimizers", optimizers=[describe_optimizer(optimizer, entry.index)])
        return entry.index

    def owner(self, optimizer: Optimizer) -> int | None:
        """The scaler that used the optimizer last."""
        return self._optimizers[optimizer].scaler

    def owner_of(self, optimizer: Optimizer) -> int | None:
        """As `owner`, and None for an optimizer that has no index yet."""
        return self.owner(optimizer) if optimizer in self._optimizers else None

    def steps(self, optimizer: Optimizer) -> Steps | None:
        """What the scaler has counted that used the optimizer last."""
        return self._optimizers[optimizer].steps

    def own(self, optimizer: Optimizer, scaler: int, steps: Steps) -> None:
        """Note that this scaler, which counts these steps, uses the optimizer from now on."""
        entry = self._optimizers[optimizer]
        entry.scaler, entry.steps = scaler, steps

    def stream(self, scaler: int, optimizers: Sequence[int]) -> int:
        """Index of a scaler together with the optimizers of an attempt."""
        return self._streams.setdefault((scaler, tuple(optimizers)), len(self._streams))

    def tensor(self, parameter: Tensor, owner: Owner | None = None) -> int:
        """Index of a parameter, for as long as an owner holds it; without any a new one each time.

        Arguments:
            owner: the model or optimizer that holds it, if it is not known to be another's.
        """
        key = id(parameter)
        index = next((kept[key].index for kept in self._tensors.values() if key in kept), None)
        if index is None:
            index = self._next_tensor
            self._next_tensor += 1
        if owner is not None:
            if owner not in self._tensors:
                self._tensors[owner] = {}
            self._tensors[owner][key] = _Kept(index, parameter)
        return index

    def introduce(
        self, optimizer: Optimizer, parameters: Iterable[Tensor], names: Mapping[int, Name]
    ) -> list[int]:
        """Indices of an optimizer's parameters; a `tensors` event for those not seen in it before."""
        entry = self._optimizers[optimizer]
        parameters = list(parameters)
        known, needed = self._tensors.get(optimizer) or {}, set(map(id, parameters))
        if known.keys() != needed:
            # Others may have let go of parameters too; that is asked only where there are new ones.
            self._let_go([optimizer] if known.keys() > needed else list(self._tensors))
            indices = [self.tensor(parameter, optimizer) for parameter in parameters]
        else:
            indices = [known[id(parameter)].index for parameter in parameters]
        if not entry.tensors.issuperset(indices):
            places = _places(optimizer)
            new = [
                _describe_tensor(
                    index, parameter, names.get(id(parameter)), entry.index, places[id(parameter)]
                )
                for index, parameter in zip(indices, parameters, strict=True)
                if index not in entry.tensors
            ]
            entry.tensors.update(indices)
            self._storages.update(filter(None, map(_storage_of, parameters)))
            self._event("tensors", tensors=new)
        return indices

    def _let_go(self, owners: Iterable[Owner]) -> None:
        """Of what these do not hold any longer, as an embedding that was replaced by a larger one."""
        for owner in owners:
            kept = self._tensors.get(owner) or {}
            for key in kept.keys() - set(map(id, _parameters_of(owner))):
                del kept[key]


_registries: weakref.WeakKeyDictionary[Sink, tuple[str, Registry]] = weakref.WeakKeyDictionary()


def registry_of(recorder: Sink) -> Registry:
    """The registry that all scalers of a recorder share; a new one in a forked child, which is another producer."""
    producer, registry = _registries.get(recorder, ("", None))
    if registry is None or producer != recorder.producer:
        registry = Registry(recorder.event)
        _registries[recorder] = (recorder.producer, registry)
    return registry


def _storage_of(parameter: Tensor) -> StorageWeakRef | None:
    """What the values of a parameter lie in, for as long as they do; None of a tensor that has none of its own."""
    try:
        return StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):  # a wrapper; a lazy parameter
        return None


def _parameters_of(owner: Owner) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return (p for group in owner.param_groups for p in group["params"])


def first_lr(optimizer: Optimizer) -> float | None:
    """Learning rate of the first group; None where it lies on a device, as reading it would wait for the device."""
    return real(optimizer.param_groups[0].get("lr")) if optimizer.param_groups else None


def lrs_of(optimizer: Optimizer) -> list[float | None]:
    """Learning rate of each group; None as for `first_lr`."""
    return [real(group.get("lr")) for group in optimizer.param_groups]


def state_of(optimizer: Optimizer) -> Mapping[Tensor, Any]:
    """What it keeps of its parameters; nothing of an imitation that has no `state`, which torch's scaler takes too."""
    state: Mapping[Tensor, Any] = getattr(optimizer, "state", {})
    return state


def step_of(optimizer: Optimizer) -> Tensor | None:
    """`state["step"]` of the first parameter that has a state, wherever it lies; None where there is none."""
    state = next(iter(state_of(optimizer).values()), None)
    step = state.get("step") if isinstance(state, dict) else None
    if isinstance(step, Real):
        return torch.tensor(float(step), dtype=torch.float64, device="cpu")
    return step if isinstance(step, Tensor) and step.numel() == 1 and not step.is_meta else None


def describe_optimizer(optimizer: Optimizer, index: int) -> dict[str, Any]:
    """What the `optimizers` event says of an optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "id": index,
        "class": type(optimizer).__name__,
        "fused": bool(getattr(optimizer, "_step_supports_amp_scaling", False)),
        "lr": lrs_of(optimizer),
        "eps": real(optimizer.param_groups[0].get("eps")) if optimizer.param_groups else None,
        "numel": sum(p.numel() for p in parameters if not is_lazy(p)),
        "tensors": len(parameters),
    }


def _describe_tensor(
    index: int, parameter: Tensor, name: Name | None, optimizer: int, place: int
) -> dict[str, Any]:
    name = name or Name(f"optimizer.{optimizer}.param.{place}", "", "")
    return {
        "id": index,
        **name._asdict(),
        "shape": list(parameter.shape),
        "dtype": dtype_name(parameter.dtype),
        "numel": parameter.numel(),
        "placements": _placements(parameter),
        "optimizer": optimizer,
    }


def _placements(parameter: Tensor) -> list[str] | None:
    """Where a DTensor lies, by the dimensions of its mesh: `Shard(dim=0)`, `Replicate()`; None for another tensor."""
    placements = getattr(parameter, "placements", None)
    return [repr(each) for each in placements] if placements is not None else None


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")


def _places(optimizer: Optimizer) -> dict[int, int]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {id(parameter): place for place, parameter in enumerate(parameters)}


def real(value: Any) -> float | None:
    """A number of a group; None where it is none, or lies on a device, as reading it would wait for the device."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, Real) else None  # Adafactor has two eps
