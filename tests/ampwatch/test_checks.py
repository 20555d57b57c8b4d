"""ampwatch.check: what is wrong before the first step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch.checks import check


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def scaler(**arguments):
    return torch.amp.GradScaler("cpu", **arguments)


def kinds(*arguments, **named):
    return [(f.kind, f.severity) for f in check(*arguments, **named)]


def test_it_is_a_public_name():
    assert ampwatch.check is check


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_what_is_well_is_silent(dtype):
    model = net()
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters())]
    assert kinds(model, optimizers, scaler(), dtype) == []
    assert kinds(model, optimizers, None, torch.bfloat16) == []


def test_dtypes_against_the_scaler():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    assert kinds(model, optimizer, None, torch.float16) == [("missing_scaler", "error")]
    assert kinds(model, optimizer, scaler(enabled=False), torch.float16) == [("missing_scaler", "error")]
    assert kinds(model, optimizer, scaler(), torch.bfloat16) == [("useless_scaler", "warning")]


def test_parameters_in_low_precision():
    model = net().half()
    assert kinds(model, torch.optim.SGD(model.parameters()), scaler()) == [("low_precision_params", "error")]
    assert kinds(model, torch.optim.Adam(model.parameters())) == [("epsilon_underflow", "fatal")]
    assert kinds(model, torch.optim.Adam(model.parameters(), eps=1e-4)) == []


def test_parameters_of_two_optimizers_or_of_another_model():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    assert kinds(model, [optimizer, torch.optim.SGD(model[1].parameters())], scaler()) == [
        ("shared_parameter", "error")
    ]
    assert kinds(copy.deepcopy(model), optimizer, scaler()) == [("no_gradients", "error")]
    assert kinds(model.requires_grad_(False), optimizer, scaler()) == [("no_gradients", "error")]


def test_an_optimizer_that_wants_a_closure():
    model = net()
    assert kinds(model, torch.optim.LBFGS(model.parameters()), scaler()) == [("call_order", "error")]
    assert kinds(model, torch.optim.LBFGS(model.parameters())) == []
