"""One loop, run by a scaler of torch's and by ours, and everything that it changed, as bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import ampwatch
from ampwatch.guard import failures

from ..recorded import MemoryRecorder

Make: TypeAlias = Callable[..., torch.amp.GradScaler]
Loop: TypeAlias = Callable[[Make], Iterator[Any]]

OURS = ("ours", "in place")
statistics = ["reference"]  # the pass of the scalers that are made …
recorders: list[MemoryRecorder] = []  # … and where those of the last loop recorded


def make(
    kind: str, model: nn.Module | None = None, *, sharded: bool = False, **arguments: Any
) -> torch.amp.GradScaler:
    """A scaler of torch, of ours, or one of torch that is watched in place; with `sharded` that of FSDP1."""
    torchs, ours = torch.amp.GradScaler, ampwatch.GradScaler
    if sharded:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        torchs, ours = ShardedGradScaler, ampwatch.ShardedGradScaler
    if kind == "torch":
        return torchs("cpu", **arguments)
    recorders.append(MemoryRecorder(statistics=statistics[0]))
    if kind == "ours":
        return ours("cpu", model=model, recorder=recorders[-1], **arguments)
    scaler = torchs("cpu", **arguments)
    assert ampwatch.watch(scaler, model=model, recorder=recorders[-1]) is scaler
    return scaler


def assert_lockstep(loop: Loop, *, fails: Collection[str] = ()) -> list[Any]:
    """The loop yields the same for all kinds of scalers, up to the same exception; answers what it yields.

    Arguments:
        fails: the places in which ours fails on purpose, and keeps it to itself.
    """
    expected = outcome(loop, "torch")
    for kind in OURS:
        assert outcome(loop, kind, fails=fails) == expected
    return expected


def outcome(loop: Loop, kind: str, *, fails: Collection[str] = ()) -> list[Any]:
    """What the loop yields, and what it raises. torch's warnings come once in a process, so they are not compared.

    Of ours nothing may have failed but in these places, and the statistics must be those of the pass that was named:
    one that fails once is given up for good, so the one that the header names at the end has run at every attempt.
    """
    before = failures.copy()
    recorders.clear()
    seen = _outcome(loop, kind)
    failed = failures - before
    assert set(failed) == set(fails if kind in OURS else ()), f"ours failed: {failed}"
    for recorder in recorders:
        ran = recorder.description.get("statistics")
        is_on = any(scaler["enabled"] for scaler in recorder.data("scaler"))
        assert ran == statistics[0] or not is_on, f"{statistics[0]} was to run, and {ran} did"
    return seen


def _outcome(loop: Loop, kind: str) -> list[Any]:
    torch.manual_seed(0)
    seen = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for each in loop(partial(make, kind)):
                seen.append(each)
    except Exception as error:  # noqa: BLE001 - which one it is, is what is compared
        seen.append((type(error), str(error)))
    return seen


def bits(value: Any) -> Any:
    """A value as what can be compared: tensors by their bits, NaN and the sign of zero included."""
    if isinstance(value, Tensor):
        return bits_of(value)
    if isinstance(value, dict):
        return {str(key): bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return repr(value)  # a scale may be NaN


def bits_of(tensor: Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        return bits_of(tensor._indices()), bits_of(tensor._values())
    if tensor.is_meta:
        return "meta", tensor.dtype, tensor.shape
    if tensor.is_nested or tensor.is_quantized:
        return str(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return tensor.dtype, tensor.shape, bytes(plain.view(torch.uint8).numpy())


def found_inf(scaler: torch.amp.GradScaler, *optimizers: torch.optim.Optimizer) -> list[Any]:
    """The flags of each optimizer; update() forgets them."""
    return [bits(list(scaler._found_inf_per_device(optimizer).values())) for optimizer in optimizers]


def snapshot(
    scaler: torch.amp.GradScaler, parameters: Any, *optimizers: torch.optim.Optimizer
) -> tuple[Any, ...]:
    """Everything that a step can change."""
    parameters = list(parameters)
    return (
        bits(parameters),
        bits([p.grad for p in parameters]),
        [bits(optimizer.state_dict()) for optimizer in optimizers],
        bits(scaler.state_dict()),
        scaler.get_scale().hex() if scaler.is_enabled() else None,
    )


def attempt(scaler: torch.amp.GradScaler, parameters: Any, *optimizers: torch.optim.Optimizer) -> Any:
    """step() and update(), and all that came of them."""
    for optimizer in optimizers:
        scaler.step(optimizer)
    flags = found_inf(scaler, *optimizers) if scaler.is_enabled() else []
    scaler.update()
    return flags, snapshot(scaler, parameters, *optimizers)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


BAD = {1: math.inf, 4: math.nan}


def spoil(parameters: Any, step: int, bad: dict[int, float]) -> None:
    """Write inf or NaN into one gradient: only here, where the training itself is not what is tested."""
    if step in bad:
        next(iter(parameters)).grad.view(-1)[0] = bad[step]


def training(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = 6,
    bad: dict[int, float] = BAD,
    style: str = "plain",
    **arguments: Any,
) -> Loop:
    """A usual loop, and what stands after every step."""

    def loop(make: Make) -> Iterator[Any]:
        model = small_model()
        optimizer = make_optimizer(model.parameters())
        scaler = make(model, **({"growth_interval": 2} | arguments))
        for step, batch in enumerate(batches(steps)):
            optimizer.zero_grad()
            for part in batch.chunk(2) if style == "accumulate" else [batch]:
                scaler.scale(loss_of(model, part)).backward()
            spoil(model.parameters(), step, bad)
            if style == "clip":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            yield attempt(scaler, model.parameters(), optimizer)

    return loop


def given(scaler: torch.amp.GradScaler, parameters: Any, grads: Any) -> None:
    """Stands for a backward pass: these are the scaled gradients."""
    scaler.scale(torch.ones(()))
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
