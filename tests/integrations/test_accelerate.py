"""Accelerate's own loop, watched and not: the same bits; and skips that Accelerate itself does not see."""

import pytest
import torch
from recorded import MemoryRecorder

import ampwatch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ampwatch.integrations.accelerate import watch

STEPS = 12


def accelerator(precision="fp16", **arguments):
    AcceleratorState._reset_state(True)
    made = Accelerator(cpu=True, mixed_precision=precision, **arguments)
    if precision == "fp16":  # Accelerate makes one for GPUs only
        made.native_amp, made.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**20)
    return made


def train(recorder=None, *, fused=False, precision="fp16", accumulate=1, clip=False):
    """What is left of the training: weights, scaler, and the steps that Accelerate takes for skipped."""
    torch.manual_seed(0)
    made = accelerator(precision, gradient_accumulation_steps=accumulate)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    model, optimizer = made.prepare(model, optimizer)
    if recorder is not None:
        assert watch(made, model, recorder=recorder) is made
    skipped = []
    for _ in range(STEPS * accumulate):
        with made.accumulate(model):
            x = torch.randn(32, 16)
            made.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            if clip and made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if made.sync_gradients:
            skipped.append(int(optimizer.step_was_skipped))
    return model.state_dict(), made.scaler and made.scaler.state_dict(), optimizer.state_dict(), skipped


LOOPS = [
    {},
    {"fused": True},
    {"fused": True, "clip": True},
    {"accumulate": 2, "clip": True},
    {"precision": "bf16"},
    {"precision": "no", "clip": True},
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_it_trains_to_the_same_bits(loop):
    recorder = MemoryRecorder()
    ours, theirs = train(recorder, **loop), train(**loop)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert recorder.column("attempt") == list(range(STEPS))
    assert recorder.events("fault", "call_fault") == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_a_skipped_step(fused):
    recorder = MemoryRecorder()
    _, _, optimizer, told = train(recorder, fused=fused)
    recorded = recorder.column("skipped")
    assert sum(recorded) > 0
    assert optimizer["state"][0]["step"] == STEPS - sum(recorded)
    assert told == ([0] * STEPS if fused else recorded)


def test_the_scaler_is_watched_in_place_and_the_model_named():
    recorder, made = MemoryRecorder(), accelerator()
    scaler = made.scaler
    model, _ = made.prepare(torch.nn.Linear(2, 1), torch.optim.SGD([torch.ones(1)], lr=1e-3))
    watch(made, model, recorder=recorder)
    assert made.scaler is scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    train(recorder)
    names = [t["name"] for data in recorder.data("tensors") for t in data["tensors"]]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_an_accelerator_with_nothing_to_watch_is_refused():
    with pytest.raises(ValueError, match="call prepare"):
        watch(accelerator("no"))


def test_its_wrapper_of_an_optimizer_is_looked_into():
    recorder, made = MemoryRecorder(), accelerator("no")
    model = torch.nn.Linear(2, 1)
    model, optimizer = made.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert ampwatch.watch_optimizer(optimizer, recorder=recorder) is optimizer
    made.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert recorder.column("numel") == [3]
