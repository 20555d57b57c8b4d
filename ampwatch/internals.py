"""What ampwatch reads of torch.amp.GradScaler's private state. With scaler.py, the only file that knows it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

Scaler: TypeAlias = torch.amp.GradScaler
UnscaleGrads: TypeAlias = Callable[[Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]
Factors: TypeAlias = tuple[Tensor, Tensor]
"""found_inf and the inverse scale."""

RELIED_ON: Final = {
    "scale": ["self", "outputs"],
    "unscale_": ["self", "optimizer"],
    "_unscale_grads_": ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"],
    "step": ["self", "optimizer", "args", "kwargs"],
    "update": ["self", "new_scale"],
    "load_state_dict": ["self", "state_dict"],
}
"""Parameters of the methods that are overridden, as they stand from torch 2.4 to 2.13."""

REPLICATOR: Final = {"__init__": ["self", "master_tensor"], "get": ["self", "device"]}
"""The same of what gives each device its copy of found_inf and of the inverse scale."""

_torchs = torch.amp.grad_scaler
_STEP: Final = Scaler.step.__code__
_WHATEVER: Final = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def mismatches(scaler: type[Scaler]) -> list[str]:
    """The methods whose parameters are not those that ampwatch was written for."""
    replicator = getattr(_torchs, "_MultiDeviceReplicator", None)
    return _differing(scaler, RELIED_ON) + _differing(replicator, REPLICATOR, "_MultiDeviceReplicator.")


def _differing(cls: type | None, expected: Mapping[str, list[str]], prefix: str = "") -> list[str]:
    differing = list[str]()
    for name, parameters in expected.items():
        methods = [vars(each)[name] for each in inspect.getmro(cls) if name in vars(each)] if cls else []
        if not methods:
            differing.append(f"{prefix}{name} is missing")
        signatures = map(inspect.signature, methods)
        differing += [f"{prefix}{name}{each}" for each in signatures if not _takes(each, parameters)]
    return differing


def _takes(signature: inspect.Signature, expected: list[str]) -> bool:
    """These parameters, or the first of them and whatever else it is given, which a user's class hands on."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    named = [name for name, kind in kinds.items() if kind not in _WHATEVER]
    is_open = set(kinds.values()) >= _WHATEVER
    return list(kinds) == expected or (is_open and named == expected[: len(named)])


def device_type(scaler: Scaler) -> str:
    """Type of the device that the scaler was made for."""
    return torch.device(scaler._device).type


def replicas_for(scaler: Scaler, unscale_grads: UnscaleGrads, factors: Factors) -> Replicas | None:
    """What this `_unscale_grads_` would give each device, if it is one of torch's and nobody is to see its operations.

    None where a class below ours, the instance, or a patch has another; and under a dispatch mode, to which each
    operation is shown (fake tensors, counters).
    """
    if "_unscale_grads_" in vars(scaler) or torch._C._len_torch_dispatch_stack():
        return None
    written_in = getattr(unscale_grads, "__globals__", None)
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    is_torchs = written_in is vars(_torchs) or (sharded is not None and written_in is vars(sharded))
    return Replicas(*factors, sharded=written_in is not vars(_torchs)) if is_torchs else None


class Replicas:
    """found_inf and the inverse scale, copied to each device where they are first wanted, as torch does.

    Arguments:
        sharded: as ShardedGradScaler's method does.
    """

    def __init__(self, found_inf: Tensor, inv_scale: Tensor, *, sharded: bool = False) -> None:
        self._sharded = sharded
        self._found_inf = _torchs._MultiDeviceReplicator(found_inf)
        self._inv_scale = _torchs._MultiDeviceReplicator(inv_scale)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """found_inf and the inverse scale there."""
        return self._found_inf.get(device), self._inv_scale.get(device)

    def coalesced(self, grad: Tensor) -> Tensor:
        """A sparse float16 gradient as torch checks it and leaves it. Waits for the device, as torch does for that."""
        return grad.float().coalesce().half() if self._sharded else grad.coalesce()

    def found_inf(self) -> dict[torch.device, Tensor]:
        """What `_unscale_grads_` answers: the flags of the devices that were asked for, and will be."""
        return self._found_inf._per_device_tensors


def found_inf_of(scaler: Scaler) -> dict[int, Tensor]:
    """found_inf of each optimizer by its identity, over its devices, on the device of the scale.

    To be read before update(), which adds the flags up in place and forgets them. No synchronisation.
    """
    flags = {}
    scale = scale_of(scaler)
    for key, state in scaler._per_optimizer_states.items():
        on_devices = [
            flag.to(scale.device, non_blocking=True) for flag in state["found_inf_per_device"].values()
        ]
        if on_devices:
            flags[key] = on_devices[0] if len(on_devices) == 1 else torch.stack(on_devices).sum()
    return flags


def is_used(scaler: Scaler) -> bool:
    """Whether scale() has made the tensors of the scale and its tracker."""
    return scaler._scale is not None


def scale_of(scaler: Scaler) -> Tensor:
    """The scale, float32 on its device."""
    assert scaler._scale is not None
    return scaler._scale


def tracker_of(scaler: Scaler) -> Tensor:
    """Clean attempts since the last change, int32 on the device of the scale."""
    assert scaler._growth_tracker is not None
    return scaler._growth_tracker


def init_scale_of(scaler: Scaler) -> float:
    """The scale that an unused scaler begins with."""
    return float(scaler._init_scale)


def describe(scaler: Scaler) -> dict[str, Any]:
    """Data of the `scaler` event; the numbers are None where the scaler is disabled and has none."""
    on = scaler.is_enabled()
    return {
        "class": type(scaler).__name__,
        "policy": _policy(scaler),
        "enabled": on,
        "device": scaler._device,
        "init_scale": float(scaler._init_scale) if on else None,
        "growth_factor": float(scaler._growth_factor) if on else None,
        "backoff_factor": float(scaler._backoff_factor) if on else None,
        "growth_interval": _whole(scaler._growth_interval) if on else None,
    }


def _policy(scaler: Scaler) -> str:
    """A ShardedGradScaler updates a scale on the CPU by a method of its own, which does not stop below inf."""
    is_own = hasattr(scaler, "_amp_update_scale_cpu_") and is_used(scaler) and scale_of(scaler).is_cpu
    return "torch-sharded-cpu" if is_own else "torch"


def _whole(interval: float) -> int | None:
    """An interval as torch takes it; None for what it will refuse at update()."""
    return int(interval) if float(interval).is_integer() else None


def describe_none(device: str) -> dict[str, Any]:
    """Data of the `scaler` event where no scaler stands beside an optimizer of this device."""
    numbers = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "replaces")
    off = {"class": "", "policy": "none", "enabled": False, "asked": False, "device": device}
    return off | dict.fromkeys(numbers)


def device_name(scaler: Scaler) -> str:
    """Name of the scaler's device, see `name_of`."""
    return name_of(scaler._device)


def name_of(device: str) -> str:
    """The GPU's name, or the type of the device where CUDA is not at work: asking would start it."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name() if device == "cuda" and started else device


def is_compiled() -> bool:
    """Whether a graph is being compiled, which our own calls must not become part of."""
    return torch.compiler.is_compiling()


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def is_captured() -> bool:
    """Whether a graph is being captured, which our own calls must not become part of."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def in_scaler_step() -> bool:
    """Whether this is called from within step() of a scaler of torch's, watched or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


def is_lazy(outputs: object) -> bool:
    """Whether something of what was handed to scale() is read once only, and so left alone."""
    if isinstance(outputs, (list, tuple)):
        return any(map(is_lazy, outputs))
    return not isinstance(outputs, Tensor)


def tensors_in(outputs: object) -> list[Tensor]:
    """The tensors handed to scale(). Lazy iterables are left alone: reading them would use them up."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, (list, tuple)):
        return [tensor for each in outputs for tensor in tensors_in(each)]
    return []
