"""TorchScript and its like meet a model with our hooks on: what worked without them works, and is the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import ampwatch

from .recorded import MemoryRecorder
from .recorded import scaler as make
from .watched import mlp

X = torch.linspace(-1, 1, 32).reshape(2, 16)
ASKED = "__prepare_scriptable__"

WAYS = {
    "script": lambda m: torch.jit.script(m)(X),
    "script of a part": lambda m: torch.jit.script(m[0])(X),
    "script of a deep copy": lambda m: torch.jit.script(copy.deepcopy(m))(X),
    "trace": lambda m: torch.jit.trace(m, X)(X),
    "export": lambda m: torch.export.export(m, (X,)).module()(X),
    "strict export": lambda m: torch.export.export(m, (X,), strict=True).module()(X),
    "fx": lambda m: torch.fx.symbolic_trace(m)(X),
    "copy": lambda m: copy.copy(m)(X),
    "vmap": lambda m: torch.vmap(m)(X),
    "functional call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), X),
    "jacobian": lambda m: torch.func.jacrev(m)(X),
    "hessian": lambda m: torch.autograd.functional.hessian(lambda x: m(x).square().sum(), X),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_takes_a_model_apart(way):
    def outcome(watched):
        torch.manual_seed(0)
        model = mlp()
        scaler = make(MemoryRecorder(), model=model) if watched else None
        with warnings.catch_warnings(record=True) as told:
            answer = WAYS[way](model)
        return answer.tolist(), [str(each.message) for each in told], scaler is not None

    assert outcome(True)[:2] == outcome(False)[:2]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_the_class_of_a_module_prepares_is_scripted():
    class Rough(nn.Linear):
        def __prepare_scriptable__(self):
            return nn.Linear(16, 4)

    model = nn.Sequential(Rough(16, 2), nn.ReLU())
    scaler = make(MemoryRecorder(), model=model)
    assert torch.jit.script(model)(X).shape == (2, 4)
    assert scaler.is_enabled()


COMPILED = {
    "script": torch.jit.script,
    "trace": lambda m: torch.jit.trace(m, X),
    "script of a part": lambda m: nn.Sequential(torch.jit.script(m[0]), *m[1:]),
    "script of a model inside": lambda m: nn.Sequential(nn.Identity(), torch.jit.script(m)),
}


@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_compiled_already_trains_as_it_does_and_is_recorded(way, scaled):
    """Losses that are not finite have the forward pass searched, as far as modules take hooks."""

    def outcome(recorder):
        torch.manual_seed(0)
        model = COMPILED[way](mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        if recorder and scaled:
            ampwatch.watch(scaler, model=model, recorder=recorder)
        elif recorder:
            ampwatch.watch_optimizer(optimizer, model=model, recorder=recorder)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(model(X if step < 2 else X / 0).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return repr([p.tolist() for p in model.parameters()])

    recorder = MemoryRecorder()
    assert outcome(recorder) == outcome(None)
    names = {tensor["name"] for each in recorder.data("tensors") for tensor in each["tensors"]}
    assert (recorder.column("attempt"), len(names)) == ([*range(8)], len([*mlp().parameters()]))
    assert recorder.events("fault") == []


def test_a_module_is_as_it_was_once_the_hooks_are_off():
    model = mlp()
    before = [set(vars(module)) for module in model.modules()]
    scaler, optimizer = make(MemoryRecorder(), model=model), torch.optim.SGD(model.parameters(), lr=0.1)
    assert ASKED in vars(model[0])
    other = copy.deepcopy(model)
    scaler.scale(model(X).sum()).backward()
    other(X)
    scaler.step(optimizer)
    scaler.update()
    assert [set(vars(module)) for module in model.modules()] == before
    assert [set(vars(module)) for module in other.modules()] == before
