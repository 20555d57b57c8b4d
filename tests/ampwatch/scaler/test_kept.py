"""What a watched scaler keeps alive: nothing that torch's would not, whatever refers to what; and how it tells optimizers."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch.ephemerons import Ephemerons

from ..recorded import scaler as make


def one_knows_the_other(model, optimizer, *ways):
    known = {"optimizer": optimizer, "module": model}
    for holder, what in ways:
        (model if holder == "module" else model.weight).__dict__[f"its_{what}"] = known[what]


WAYS = {
    "module → optimizer": [("module", "optimizer")],
    "parameter → module": [("parameter", "module")],
    "parameter → optimizer": [("parameter", "optimizer")],
    "all": [("module", "optimizer"), ("parameter", "module"), ("parameter", "optimizer")],
}


def left_after(make_scaler, ways):
    """Whether a model and its optimizer are there once only their scaler is kept."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_knows_the_other(model, optimizer, *ways)
    scaler = make_scaler(model)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    refs = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    return [ref() is not None for ref in refs]


@pytest.mark.parametrize("ways", WAYS)
def test_models_and_optimizers_go_as_with_torchs_scaler(recorder, ways):
    plain = left_after(lambda _: torch.amp.GradScaler("cpu"), WAYS[ways])
    assert left_after(lambda _: make(recorder), WAYS[ways]) == plain == [False, False]


def test_so_does_a_model_that_the_scaler_was_given_and_that_knows_its_optimizer(recorder):
    ways = WAYS["module → optimizer"]
    assert left_after(lambda model: make(recorder, model=model), ways) == [False, False]


def test_and_one_whose_optimizer_is_watched_alone(recorder):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_knows_the_other(model, optimizer, *WAYS["module → optimizer"])
    ampwatch.watch_optimizer(optimizer, model=model, recorder=recorder)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    refs = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert recorder.column("attempt") == [0, 1, 2]


class Alike(torch.optim.SGD):
    """Each is equal to every other, and none has a hash."""

    __hash__ = None

    def __eq__(self, other):
        return True


def test_optimizers_are_told_apart_by_identity(recorder):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers, scaler = [Alike([p], lr=0.1) for p in parameters], make(recorder, init_scale=1.0)
    for _ in range(2):
        scaler.scale(parameters[0].sum() + 2 * parameters[1].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert [o["id"] for event in recorder.data("optimizers") for o in event["optimizers"]] == [0, 1]
    assert (recorder.column("stepped"), recorder.column("numel")) == ([0b11] * 2, [4] * 2)


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def test_a_value_goes_with_its_key_although_it_refers_to_it():
    kept, optimizer = Ephemerons(), sgd()
    kept[optimizer] = [optimizer]
    assert (kept.get(optimizer), list(kept), list(kept.values())) == ([optimizer], [optimizer], [[optimizer]])
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert (ref(), list(kept)) == (None, [])


def test_a_value_goes_with_the_mapping():
    kept, optimizer, value = Ephemerons(), sgd(), torch.zeros(1)
    kept[optimizer] = value
    ref = weakref.ref(value)
    del kept, value
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_key_is_none(copied):
    kept, optimizer = Ephemerons(), sgd()
    kept[optimizer] = 1
    other = copied(optimizer)
    assert kept.get(other) is None
    kept[other] = 2
    assert (kept[optimizer], kept[other]) == (1, 2)


class Imitation:
    """Pickled with all its attributes, where an optimizer of torch's leaves out what it does not know."""

    def __init__(self):
        self.param_groups = [{"params": [], "lr": 0.1}]


def test_a_key_is_saved_without_anything_of_ours():
    kept, imitation, file = Ephemerons(), Imitation(), io.BytesIO()
    kept[imitation] = 1
    torch.save(imitation, file)
    assert b"ephemerons" not in file.getvalue()
    file.seek(0)
    assert kept.get(torch.load(file, weights_only=False)) is None


def test_a_module_is_left_as_it_is():
    kept, model = Ephemerons(), nn.Linear(2, 2)
    before = set(vars(model))
    kept[model] = 1
    assert (kept[model], set(vars(model))) == (1, before)
