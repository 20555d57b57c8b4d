"""What a watched training leaves with the model: nothing that stands in the way of torch, or keeps it in memory."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch.internals import compiled_graphs

from ..recorded import scaler as make
from .loops import attempt, half, network, sgd


def watched_optimizer(recorder, model):
    return None, ampwatch.watch_optimizer(sgd(model), model=model, recorder=recorder)


def with_model(recorder, model):
    return make(recorder, model=model), sgd(model)


def without_model(recorder, model):
    return make(recorder), sgd(model)


@pytest.fixture(params=[with_model, without_model, watched_optimizer])
def trained(recorder, request):
    """A model that was trained, and what trained it."""
    model = network(4, 8, 2)
    scaler, optimizer = request.param(recorder, model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = half(model, torch.ones(2, 4))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [model, optimizer, scaler]


def test_parameters_can_be_swapped_as_torch_does_to_move_a_model_of_dtensors(trained):
    model, optimizer, _ = trained
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(map(operator.is_, model.parameters(), optimizer.param_groups[0]["params"]))


def test_model_and_optimizer_go_while_the_scaler_stays(trained):
    model, optimizer, scaler = trained
    gone = weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)
    trained[:] = [scaler]
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


def test_a_model_that_was_made_for_the_scaler_only_is_kept_while_its_parts_are_trained(recorder):
    first, second = network(2, 2), network(2, 1)
    scaler = make(recorder, model=nn.ModuleDict({"first": first, "second": second}))
    gc.collect()
    attempt(scaler, nn.Sequential(first, second, nn.Flatten(0)), sgd(first), x=[(1.0, 2.0)])
    assert [each["name"] for each in recorder.data("tensors")[0]["tensors"]] == [
        "first.0.weight",
        "first.0.bias",
    ]


def test_a_parameter_at_the_address_of_one_that_is_gone_has_an_index_of_its_own(recorder):
    scaler, model = make(recorder), None
    for _ in range(3):
        model = network(2, 1)
        attempt(scaler, nn.Sequential(model, nn.Flatten(0)), sgd(model), x=[(1.0, 2.0)])
        gc.collect()
    assert [[each["id"] for each in data["tensors"]] for data in recorder.data("tensors")] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_a_parameter_that_an_optimizer_has_replaced_is_let_go(recorder):
    scaler, model = make(recorder), network(2, 1)
    optimizer = sgd(model)
    attempt(scaler, nn.Sequential(model, nn.Flatten(0)), optimizer, x=[(1.0, 2.0)])
    old = weakref.ref(model[0].weight)
    model[0].weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(1, 2))
    attempt(scaler, nn.Sequential(model, nn.Flatten(0)), optimizer, x=[(1.0, 2.0)])
    gc.collect()
    assert old() is None


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x))


def compiled_whole(model):
    compiled = torch.compile(model, backend="eager")
    return model, compiled


def given_compiled(model):
    compiled = torch.compile(model, backend="eager")
    return compiled, compiled


def compiled_in_part(model):
    model.second = torch.compile(model.second, backend="eager")
    return model, model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model, model


def graphs_of(compiled, make_scaler):
    """How many graphs a training compiles whose loss is not finite for long, so that ours would like to look closer."""
    torch._dynamo.reset()
    before = compiled_graphs()
    watched, model = compiled(Network())
    scaler, optimizer = make_scaler(watched), sgd(model)
    for i in range(72):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 4), torch.nan if i > 2 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return compiled_graphs() - before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the compiler itself
@pytest.mark.parametrize("compiled", [compiled_whole, given_compiled, compiled_in_part, compiled_in_place])
def test_a_compiled_model_is_compiled_as_often_as_with_torchs_scaler(compiled, recorder):
    theirs = graphs_of(compiled, lambda _: torch.amp.GradScaler("cpu"))
    assert graphs_of(compiled, lambda model: make(recorder, model=model)) == theirs > 0
    assert recorder.data("forward_search") == []
