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


def on_meta():
    """A model that got its numbers after its optimizer was made, which therefore holds what has none."""
    with torch.device("meta"):
        model = net()
    optimizer = torch.optim.SGD(model.parameters())
    return model.to_empty(device="cpu"), optimizer


def test_parameters_on_the_meta_device():
    model, optimizer = on_meta()
    (finding,) = check(model, optimizer, scaler())
    assert (finding.kind, finding.severity, finding.tensor) == (
        "no_gradients",
        "error",
        "optimizer.0.param.0",
    )
    assert finding.headline.startswith(
        "SGD holds 4 parameters on the meta device, which stores no numbers, from step 0 on (optimizer.0.param.0 first)"
    )
    assert kinds(model, torch.optim.SGD(model.parameters()), scaler()) == []


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the scaler would be on")
def test_a_scaler_that_torch_has_turned_off(tmp_path):
    settings, model = ampwatch.Settings.load(environ={}, dir=str(tmp_path), quiet=True), net()
    optimizer = torch.optim.SGD(model.parameters())
    ours = ampwatch.GradScaler("cuda", settings=settings)
    for dtype in (None, torch.float16):
        assert kinds(model, optimizer, ours, dtype) == [("backend_limit", "warning")]
    off = ampwatch.GradScaler("cuda", enabled=False, settings=settings)
    assert kinds(model, optimizer, off) == []
    ampwatch.finish()


def test_a_scaler_for_another_device_works_and_is_explained():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    (finding,) = check(model, optimizer, torch.amp.GradScaler("mps"))
    assert (finding.kind, finding.severity, finding.state) == ("backend_limit", "info", "explained")
    assert finding.headline.startswith("The GradScaler was made for mps and the parameters of SGD are on cpu")
