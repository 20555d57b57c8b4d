"""Calls in the wrong order, and arguments that are none: what torch raises, ours raises in the same words."""

from __future__ import annotations

import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch.guard import failures

from ..recorded import MemoryRecorder
from .twin import assert_lockstep, batches, loss_of, small_model


def calls(*names):
    """These methods, one after another."""

    def make_them(scaler, optimizer):
        for name in names:
            getattr(scaler, name)(*([optimizer] if name in ("step", "unscale_") else []))

    return make_them


def float16_optimizer():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    return torch.optim.SGD([parameter])


WRONG = {
    "unscale twice": calls("unscale_", "unscale_"),
    "step twice": calls("step", "step"),
    "unscale after step": calls("step", "unscale_"),
    "unscale after unscale and step": calls("unscale_", "step", "unscale_"),
    "update at once": calls("update"),
    "update after unscale": calls("unscale_", "update", "step"),
    "update twice": calls("step", "update", "update"),
    "step after update": calls("step", "update", "step"),
    "closure": lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: None),
    "closure by its place": lambda scaler, optimizer: scaler.step(optimizer, lambda: torch.ones(())),
    "more arguments": lambda scaler, optimizer: scaler.step(optimizer, None, 1),
    "an optimizer without gradients": lambda scaler, _: scaler.step(
        torch.optim.SGD([nn.Parameter(torch.ones(1))])
    ),
    "scale of a number": lambda scaler, _: scaler.scale(1.0),
    "scale of numbers": lambda scaler, _: list(scaler.scale([1.0, 2.0])),
    "scale of nothing": lambda scaler, _: scaler.scale(None),
    "new scale of two": lambda scaler, _: scaler.update(torch.ones(2)),
    "new scale with a gradient": lambda scaler, _: scaler.update(torch.ones((), requires_grad=True)),
    "new scale of a whole number": lambda scaler, _: scaler.update(4),
    "new scale of a text": lambda scaler, _: scaler.update("4"),
    "empty state": lambda scaler, _: scaler.load_state_dict({}),
    "pickled within": lambda scaler, o: (scaler.unscale_(o), pickle.dumps(scaler)),
    "float16": lambda scaler, _: scaler.unscale_(float16_optimizer()),
    "a growth factor of one": lambda scaler, o: (scaler.set_growth_factor(0.5), calls("step", "update")(scaler, o)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_wrong_calls(name, scaled, enabled):
    """After a loss was scaled and before any; and what a scaler that is off lets pass."""

    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model, enabled=enabled)
        if scaled:
            scaler.scale(loss_of(model, batches(1)[0])).backward()
        try:
            yield type(WRONG[name](scaler, optimizer))
        finally:
            yield scaler.state_dict(), [p.tolist() for p in model.parameters()]

    assert_lockstep(loop)


@pytest.mark.parametrize(
    "arguments",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"init_scale": "a"}, {"growth_interval": 2.5}],
)
def test_wrong_arguments(arguments):
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(**arguments)
        scaler.scale(loss_of(model, batches(1)[0])).backward()
        yield scaler.step(optimizer)
        yield scaler.update()

    assert_lockstep(loop)


@pytest.mark.parametrize("given", [None, object(), nn.Linear(1, 1)])
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_what_is_no_optimizer(given, call, monkeypatch):
    """Ours fails before torch does, and keeps it to itself."""
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def loop(make):
        scaler = make()
        scaler.scale(torch.ones(()))
        yield getattr(scaler, call)(given)

    assert_lockstep(loop, fails={"scaler.unscale_", "scaler.gradients", f"scaler.{call}"})
    failures.clear()


@pytest.mark.parametrize("call", ["scale", "unscale_", "step", "load_state_dict"])
def test_missing_arguments_are_missed_in_torchs_words(call):
    def missed(cls, **recorded):
        with pytest.raises(TypeError) as told:
            getattr(cls("cpu", **recorded), call)()
        return str(told.value)

    assert missed(ampwatch.GradScaler, recorder=MemoryRecorder()) == missed(torch.amp.GradScaler)


@pytest.mark.parametrize("wrong", [{"device": None}, {"device": "nonsense"}, {"nonsense": 1}])
def test_wrong_arguments_of_the_class(wrong, monkeypatch):
    """What torch raises later, if at all."""
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def outcome(cls, **recorded):
        try:
            scaler = cls(**wrong, **recorded)
            return scaler.state_dict(), type(scaler.scale(torch.ones(())))
        except Exception as error:  # noqa: BLE001 - which one it is, is what is compared
            return type(error)

    assert outcome(ampwatch.GradScaler, recorder=MemoryRecorder()) == outcome(torch.amp.GradScaler)
    failures.clear()


def test_cuda_asked_for_and_not_there_warns_as_torch_does():
    def warned(make_scaler):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return make_scaler("cuda").is_enabled(), [(w.category, str(w.message)) for w in caught]

    ours = partial(ampwatch.GradScaler, recorder=MemoryRecorder())
    assert warned(ours) == warned(torch.amp.GradScaler)
