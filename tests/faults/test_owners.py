"""Optimizers that hold other tensors than the model, seen while it trains: nobody tells them of each other."""

import copy

import pytest
import torch
from loops import (
    above_info,
    features,
    findings,
    half,
    mlp,
    recorded,
    recorded_optimizer,
    regression,
    told,
    train,
    worse_than_info,
)
from torch import nn


def fine_tuned(directory, replaced_at, *, named=True, before=0, steps=20):
    """A head that is replaced before or after the optimizer is made, or in the middle of training."""
    model = mlp()
    if replaced_at == "before":
        model[2] = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with recorded(directory) as make:
        scaler = make(model=model if named else None)
        train(model, scaler, lambda s: regression(model, s), steps=before, optimizer=optimizer)
        if replaced_at == "after":
            model[2] = nn.Linear(16, 1)
        train(model, scaler, lambda s: regression(model, s), steps=steps, optimizer=optimizer)
    return model


@pytest.mark.parametrize(
    ("named", "before", "tensor"),
    [
        (True, 0, "2.weight"),
        (False, 0, "Linear.weight"),
        (True, 30, "Linear.weight"),  # by its module's type: names are looked up once
        (False, 30, "Linear.weight"),
    ],
)
def test_a_head_that_took_the_place_of_the_one_the_optimizer_holds(tmp_path, named, before, tensor):
    fine_tuned(tmp_path, "after", named=named, before=before)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.tensor) == ("no_gradients", "warning", tensor)
    assert finding.first_attempt == before + 7
    assert finding.headline.startswith(f"2 of 4 parameters of AdamW are not the model's, and {tensor}, which")


def test_nothing_else_is_said_of_it_later(tmp_path):
    fine_tuned(tmp_path, "after", steps=70)
    said = [(f.kind, f.severity) for f in findings(tmp_path) if f.kind != "calibration"]
    assert said == [("no_gradients", "warning")]


@pytest.mark.parametrize("named", [True, False])
def test_a_head_that_was_replaced_in_time_is_silent(tmp_path, named):
    fine_tuned(tmp_path, "before", named=named)
    assert above_info(tmp_path) == []


class Branches(nn.Module):
    """A body and two heads, of which one is used."""

    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        return self.used(self.body(x).relu())


def branches(directory, parameters_of, steps=20):
    model = Branches()
    optimizer = torch.optim.SGD(parameters_of(model), 1e-3)
    with recorded(directory) as make:
        train(model, make(), lambda s: regression(model, s), steps=steps, optimizer=optimizer)


def test_a_branch_that_is_never_taken_is_silent(tmp_path):
    branches(tmp_path, lambda model: model.parameters())
    assert above_info(tmp_path) == []


def test_a_body_that_is_left_out_of_the_optimizer_beside_an_unused_head_is_silent(tmp_path):
    branches(tmp_path, lambda model: [*model.used.parameters(), *model.unused.parameters()])
    assert above_info(tmp_path) == []


class Masters(torch.optim.SGD):
    """Steps copies of its own, as optimizers that keep weights in more bits do."""

    def __init__(self, params, lr):
        self.models = list(params)
        super().__init__([nn.Parameter(p.detach().clone()) for p in self.models], lr)

    def take(self):
        for mine, p in zip(self.param_groups[0]["params"], self.models, strict=True):
            mine.grad = None if p.grad is None else p.grad.clone()


def test_copies_of_the_weights_that_are_stepped_in_their_place_are_silent(tmp_path):
    model = Branches()
    optimizer = Masters(model.parameters(), 1e-3)
    with recorded(tmp_path) as make:
        scaler = make()
        for step in range(20):
            model.zero_grad()
            with half():
                loss = regression(model, step)
            scaler.scale(loss).backward()
            optimizer.take()
            scaler.step(optimizer)
            scaler.update()
    assert above_info(tmp_path) == []


def test_optimizers_that_take_turns_are_silent(tmp_path):
    """The critic's tensors have gradients of the generator's loss, and five of its steps come first."""
    generator, critic = mlp(out=8), mlp()
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (generator, critic)]
    extra = nn.Linear(8, 1)  # never used
    optimizers[1].add_param_group({"params": list(extra.parameters())})
    with recorded(tmp_path) as make:
        scaler = make()
        for step in range(60):
            turn = step % 6 == 5
            optimizer = optimizers[0 if turn else 1]
            optimizer.zero_grad()
            with half():
                made = critic(generator(features(step)))
                loss = made.float().mean() * (-1 if turn else 1)
                loss = loss if turn else (1 - critic(features(step + 1))).float().relu().mean() + loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [kind for kind, _ in above_info(tmp_path) if kind == "no_gradients"] == []


@pytest.mark.parametrize("alive", [True, False])
def test_without_a_model_an_optimizer_of_a_copy_is_told_from_what_has_gradients(tmp_path, alive):
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), 1e-3)
    if not alive:
        del other
    with recorded(tmp_path) as make, pytest.raises(AssertionError, match="No inf checks"):
        train(model, make(), lambda s: regression(model, s), optimizer=optimizer)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.first_attempt) == ("no_gradients", 0)
    assert "it holds other tensors than the model" in finding.headline
    assert finding.evidence[1].text == (
        "4 parameters with a gradient and in no optimizer: Linear.weight, Linear.bias, Linear.weight, Linear.bias."
    )


def test_a_loss_that_does_not_reach_the_head_is_not_laid_to_another_model(tmp_path):
    model = Branches()
    optimizer = torch.optim.SGD(model.unused.parameters(), 1e-3)
    with recorded(tmp_path) as make, pytest.raises(AssertionError, match="No inf checks"):
        train(model, make(), lambda s: regression(model, s), optimizer=optimizer)
    assert [("the loss does not depend on them" in f.headline) for f in worse_than_info(tmp_path)] == [True]
    assert told(tmp_path) == [("no_gradients", "error", 0, "")]


def test_without_a_scaler_it_is_the_same(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model[2] = nn.Linear(16, 1)
    with recorded_optimizer(tmp_path) as watched:
        watched(optimizer, model=model)
        for step in range(12):
            optimizer.zero_grad()
            regression(model, step).backward()
            optimizer.step()
    assert told(tmp_path) == [("no_gradients", "warning", 7, "2.weight")]
