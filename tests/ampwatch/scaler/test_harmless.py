"""Ours fails, or the device is slow: the training is torch's, and nothing waits."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampwatch.guard import failures
from ampwatch.observers import AutocastProbe
from ampwatch.probes import Probes
from ampwatch.watching import Watch

from ..recorded import MemoryRecorder
from ..recorded import scaler as make
from .loops import half, network

ENTRIES = [
    "_note_losses", "_announce_step", "_announce_unscale", "_take_gradients", "_before_update", "_after_update", "_send",
    "_close", "_close_step", "_known_scale", "stepped", "accumulated",
]  # fmt: skip


def trained(scaler):
    torch.manual_seed(0)
    model = network(4, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.full((2, 4), 1e4 if i == 3 else 1.0))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    return [p.tolist() for p in model.parameters()], scaler.state_dict()


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_fault_of_ours_leaves_the_training_torchs(entry, recorder, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def broken(*_args, **_kwargs):
        raise ZeroDivisionError(entry)

    scaler = make(recorder, growth_interval=2)
    vars(scaler)["_ampwatch"].__class__ = type("Broken", (Watch,), {entry: broken})
    assert trained(scaler) == trained(torch.amp.GradScaler("cpu", growth_interval=2))


@pytest.mark.parametrize("method", ["event", "next_attempt", "describe", "attach"])
def test_a_fault_of_the_recorder_leaves_the_training_torchs(method, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    broken = type("Broken", (MemoryRecorder,), {method: lambda *_args, **_kwargs: 1 / 0})
    scaler = make(broken(), growth_interval=2)
    assert trained(scaler) == trained(torch.amp.GradScaler("cpu", growth_interval=2))


def test_an_observer_that_fails_costs_one_attempt(recorder, monkeypatch):
    failures.clear()
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    monkeypatch.setattr(AutocastProbe, "collect", lambda _: 1 / 0)
    model = network(4, 8, 1)
    scaler, optimizer = make(recorder, model=model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        scaler.scale(half(model, torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert recorder.column("attempt") == [1, 2, 3]
    assert [fault["where"] for fault in recorder.data("fault")] == ["scaler.update"]
    assert recorder.data("origin")


class Synchronisations(TorchDispatchMode):
    """Counts what would wait for a device: reading a value, and copies to the host that block."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in (
            "_local_scalar_dense",
            "is_nonzero",
            "nonzero",
            "equal",
            "_unique2",
            "masked_select",
        )
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_that_torch_does_not_read(recorder):
    """Under the mode torch's own method unscales. (The CPU kernel reads its factors from main memory.)"""

    def count(scaler):
        with Synchronisations() as mode:
            trained(scaler)
        return mode.count

    assert count(make(recorder)) == count(torch.amp.GradScaler("cpu"))


def real_memory(size):
    with _disable_current_modes():
        vector = torch.zeros(size, dtype=torch.float64, device="cpu")
        return vector, vector.numpy()


def test_scale_unscale_and_update_never_wait_for_a_cuda_device(recorder):
    """Fake CUDA tensors have no values, so whatever reads one raises."""
    scaler = make(recorder)
    vars(scaler)["_ampwatch"] = Watch(recorder, memory=real_memory)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        parameter = nn.Parameter(torch.ones(70))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(3):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(70)
            scaler.unscale_(optimizer)
            scaler.update()
        with pytest.raises(DataDependentOutputException):
            scaler.get_scale()
    assert len(vars(scaler)["_ampwatch"]._dispatch._ring) == 3


class Fused(torch.optim.SGD):
    """Takes scaled gradients, as a fused optimizer does, and leaves the weights alone."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.grad_scale is not None


def test_a_fused_optimizer_steps_without_a_wait_for_a_cuda_device(recorder):
    scaler = make(recorder)
    vars(scaler)["_ampwatch"] = watch = Watch(recorder, memory=real_memory)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        parameter = nn.Parameter(torch.ones(70))
        optimizer = Fused([parameter], lr=0.1)
        for _ in range(3):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(70)
            scaler.step(optimizer)
            scaler.update()
        assert len(watch._dispatch._ring) == 6  # three attempts, and a look at the step of each
        rows = watch._dispatch._flight.rows_of(2)
        assert watch._dispatch._ring.send(rows, None)  # as an autopsy does


def test_memory_that_the_device_writes_is_made_at_the_first_attempt(recorder):
    """Pinned memory, for which a device may stand still: what follows, an autopsy too, finds it there."""
    made, counts = [], []

    def counted(size):
        made.append(size)
        return real_memory(size)

    scaler = make(recorder)
    vars(scaler)["_ampwatch"] = watch = Watch(recorder, memory=counted)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        parameter = nn.Parameter(torch.ones(70))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for attempt in range(5):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(70)
            scaler.unscale_(optimizer)
            scaler.update()
            assert watch._dispatch._ring.send(watch._dispatch._flight.rows_of(attempt), None)
            counts.append(len(made))
    assert counts == counts[:1] * 5


def test_gradients_on_several_devices_are_gathered_without_a_wait(recorder):
    """Parameters on two GPUs and on the host; the scale lies on the first."""
    scaler = make(recorder)
    vars(scaler)["_ampwatch"] = watch = Watch(recorder, memory=real_memory)
    with FakeTensorMode(allow_non_fake_inputs=True):
        devices = ("cuda:0", "cuda:1", "cpu", "cuda:1")
        parameters = [nn.Parameter(torch.ones(70, device=device)) for device in devices]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            scaler.scale(torch.ones((), device="cuda:0"))
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            scaler.unscale_(optimizer)
            scaler.update()
        rows = watch._dispatch._flight.rows_of(1)
    assert [(each.device.type, each.device.index, len(each)) for each in rows] == [
        ("cuda", 0, 1),
        ("cuda", 1, 2),
        ("cpu", None, 1),
    ]
    assert len(watch._dispatch._ring) == 2


def test_a_part_of_a_watch_that_cannot_be_closed_is_counted_and_keeps_none_of_the_others(
    recorder, monkeypatch
):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    monkeypatch.setattr(Probes, "close", lambda _: 1 / 0)
    model, before = network(4, 2), failures["watch.close"]
    scaler, optimizer = make(recorder, model=model), torch.optim.SGD(model.parameters())
    scaler.scale(half(model, torch.ones(2, 4))).backward()
    scaler.step(optimizer)
    scaler.update()
    del scaler
    gc.collect()
    assert failures["watch.close"] > before
    hooks = model[0].weight._post_accumulate_grad_hooks.values()
    assert "scaler.accumulated" not in [hook._guard._where for hook in hooks]
