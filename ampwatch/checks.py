"""Checks that need no training: what an optimizer, its parameters and the scaler say of themselves.

    for finding in ampwatch.check(model, optimizer, scaler, autocast_dtype=torch.float16):
        print(finding.headline)

The same facts are recorded by themselves when a scaler first meets an optimizer (event `check`), so that a recorded
run is diagnosed alike. Nothing here synchronises with a device: only attributes are read, no numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from . import internals
from .hooks import Hook
from .names import Name, names_of
from .registry import describe_optimizer, dtype_name, real, state_of

if TYPE_CHECKING:
    from .diagnosis.findings import Finding

MOST_NAMED: Final = 8
WATCH: Final = "_ampwatch"  # attribute of a scaler that is watched


def check(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler: torch.amp.GradScaler | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> list[Finding]:
    """What is wrong before the first step, most severe first; nothing where all is well.

    Arguments:
        model: that is trained.
        optimizer: one, or all that the scaler steps.
        scaler: torch's or ampwatch's; None where there is none.
        autocast_dtype: of the forward pass; None without autocast.
    Errors: none of its own. Synchronisation: none.
    """
    from .diagnosis import Diagnosis
    from .records import Event, pack_events

    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    told = [Event(type, 0.0, data=data) for type, data in _events(model, optimizers, scaler, autocast_dtype)]
    batch = pack_events(told, producer="0" * 32, seq=0, run="check", rank=0)
    return Diagnosis.from_batches([batch]).findings()


def facts_of(
    optimizer: Optimizer,
    index: int,
    *,
    names: Mapping[int, Name],
    others: Mapping[int, Optimizer],
) -> dict[str, Any]:
    """Data of a `check` event (docs/format.md).

    Arguments:
        index: of the optimizer in the records.
        names: what the model calls its parameters, by identity; empty without a model.
        others: the other optimizers of the scaler, by index.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trainable = [p for p in parameters if p.requires_grad]
    name = _naming(optimizer, index, names)
    return {
        **describe_optimizer(optimizer, index),
        "eps": _eps(optimizer),
        "closure": wants_closure(optimizer),
        "trainable": len(trainable),
        "frozen": len(parameters) - len(trainable),
        "foreign": sum(id(p) not in names for p in parameters) if names else None,
        "with_grad": sum(p.grad is not None for p in parameters),
        "without_grad": _without_grad(trainable, name),
        "low": _low_precision(trainable, name),
        "state_dtypes": _state_dtypes(optimizer),
        "steps_before": _steps_before(optimizer),
        "hooks": sum(map(_has_hooks, trainable)),
        "devices": sorted({p.device.type for p in parameters}),
        "on_meta": _on_meta(trainable, name),
        "shared": [each for i, other in others.items() if (each := _shared(trainable, other, i, name))],
    }


def _events(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    scaler: torch.amp.GradScaler | None,
    autocast_dtype: torch.dtype | None,
) -> Iterable[tuple[str, dict[str, Any]]]:
    names = names_of(model)
    missed = _missed(model, optimizers)
    if scaler is not None:
        asked = getattr(vars(scaler).get(WATCH), "asked", None)
        yield "scaler", {"scaler": 0, "asked": asked, **internals.describe(scaler)}
    if autocast_dtype is not None:
        yield "autocast", {"dtype": dtype_name(autocast_dtype), "device": ""}
    for i, optimizer in enumerate(optimizers):
        facts = facts_of(optimizer, i, names=names, others=dict(enumerate(optimizers[:i])))
        yield (
            "check",
            {**facts, "with_grad": None, "missed": missed, "static": True, "scaled": scaler is not None},
        )


def _missed(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What the model trains and no optimizer holds."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    return {"count": len(names), "tensors": names[:MOST_NAMED]}


def _naming(optimizer: Optimizer, index: int, names: Mapping[int, Name]) -> dict[int, str]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {
        id(p): names[id(p)].name if id(p) in names else f"optimizer.{index}.param.{place}"
        for place, p in enumerate(parameters)
    }


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether step() cannot be called without one, as that of LBFGS."""
    step = getattr(type(optimizer), "step", None)
    if step is None:  # a wrapper that hands everything on
        step = getattr(optimizer.step, "__func__", optimizer.step)
    return _requires_closure(step)


@lru_cache(maxsize=64)  # asked at each step
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _without_grad(trainable: Sequence[Tensor], name: Mapping[int, str]) -> dict[str, Any]:
    """Trainable parameters that have no gradient, where others have: how many, their names, and the others' elements."""
    having = [p for p in trainable if p.grad is not None]
    names = [name[id(p)] for p in trainable if p.grad is None and (is_lazy(p) or p.numel())] if having else []
    elements = sum(p.numel() for p in having)
    return {"count": len(names), "tensors": names[:MOST_NAMED], "elements": elements}


def _on_meta(trainable: Iterable[Tensor], name: Mapping[int, str]) -> dict[str, Any]:
    """Trainable parameters that have a shape and no numbers, as before a model is loaded."""
    names = [name[id(p)] for p in trainable if p.is_meta]
    return {"count": len(names), "tensors": names[:MOST_NAMED]}


def _low_precision(parameters: Iterable[Tensor], name: Mapping[int, str]) -> dict[str, list[str]]:
    """Names of parameters that a scaler was not made for, by dtype."""
    low: dict[str, list[str]] = {}
    for parameter in parameters:
        if parameter.is_complex() or parameter.dtype in (torch.float16, torch.bfloat16):
            low.setdefault(dtype_name(parameter.dtype), []).append(name[id(parameter)])
    return {dtype: named[:MOST_NAMED] for dtype, named in low.items()}


def _has_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks that are not ours."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = (hook for name in names for hook in (getattr(parameter, name, None) or {}).values())
    return any(not isinstance(hook, Hook) for hook in hooks)


def _eps(optimizer: Optimizer) -> float | None:
    """The smallest eps of the groups that compute in float16, where there are such; else the first group's."""
    groups = optimizer.param_groups
    halves = [group for group in groups if any(_is_half(p, state_of(optimizer)) for p in group["params"])]
    found = [eps for group in halves or groups[:1] if (eps := real(group.get("eps"))) is not None]
    return min(found, default=None)


def _is_half(parameter: Tensor, states: Mapping[Tensor, Any]) -> bool:
    """Whether a parameter, or anything that an optimizer keeps of it, is float16."""
    state = states.get(parameter)
    kept = state.values() if isinstance(state, dict) else ()
    trained = parameter.requires_grad and parameter.dtype is torch.float16
    return trained or any(isinstance(v, Tensor) and v.dtype is torch.float16 for v in kept)


def _state_dtypes(optimizer: Optimizer) -> list[str]:
    states = (
        value for state in state_of(optimizer).values() if isinstance(state, dict) for value in state.values()
    )
    return sorted({dtype_name(v.dtype) for v in states if isinstance(v, Tensor) and v.is_floating_point()})


def _steps_before(optimizer: Optimizer) -> int | None:
    """Steps that the optimizer's own state counts; None where it counts none, or counts them on a device."""
    counted = (state.get("step") for state in state_of(optimizer).values() if isinstance(state, dict))
    step = next((step for step in counted if step is not None), None)
    if isinstance(step, Tensor):  # by numpy, which reads main memory and nothing else
        return int(step.numpy()) if step.device.type == "cpu" else None
    return None if step is None else int(step)


def _shared(
    parameters: Iterable[Tensor], other: Optimizer, index: int, name: Mapping[int, str]
) -> dict[str, Any] | None:
    theirs: Collection[int] = {id(p) for group in other.param_groups for p in group["params"]}
    both = [name[id(p)] for p in parameters if id(p) in theirs]
    return {"optimizer": index, "count": len(both), "tensors": both[:MOST_NAMED]} if both else None
