"""Scales and values at the edges of their formats: the same path, skips, gradients and weights as torch's."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from .twin import assert_lockstep, attempt, bits, given, training

pytestmark = pytest.mark.usefixtures("each_pass")


@pytest.mark.parametrize("init_scale", [1000.0, 2.0**127, 3e-39, 2.0**-130, 1.0, 0.0, math.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_odd_scales(init_scale, fused):
    assert_lockstep(training(partial(torch.optim.Adam, fused=fused), init_scale=init_scale))


@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_factor": 1.7, "init_scale": 1000.0},
        {"growth_factor": 1.7, "backoff_factor": 0.3},
        {"growth_interval": 1, "init_scale": 2.0**126},
        {"growth_interval": 1, "growth_factor": 2.0**60},
    ],
)
def test_odd_factors(arguments):
    assert_lockstep(training(torch.optim.SGD, **arguments))


def test_a_growth_interval_that_is_lowered_below_the_tracker():
    def loop(make):
        parameter = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), make(growth_interval=4)
        for step in range(6):
            if step == 3:
                scaler.set_growth_interval(2)
            given(scaler, [parameter], [torch.full((3,), torch.inf if step == 4 else 64.0)])
            yield attempt(scaler, [parameter], optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize(
    "bad", [dict.fromkeys(range(6), math.inf), {0: -math.inf}, dict.fromkeys((1, 2, 4), math.nan)]
)
def test_runs_of_skips(bad):
    assert_lockstep(training(torch.optim.AdamW, bad=bad))


def test_disabled():
    assert_lockstep(training(torch.optim.Adam, enabled=False))


@pytest.mark.parametrize(
    "new_scale", [512.0, torch.tensor(384.0), torch.tensor([384.0]), torch.tensor(5e-42)]
)
def test_manual_updates(new_scale):
    def loop(make):
        parameter = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), make()
        for step in range(4):
            given(scaler, [parameter], [torch.arange(3.0)])
            scaler.step(optimizer)
            scaler.update(new_scale if step == 1 else None)
            yield bits(parameter), scaler.state_dict()
        scaler.update(new_scale)
        yield scaler.get_scale()

    assert_lockstep(loop)


VALUES = {
    "nan": [math.nan, 1.0],
    "-nan": [-math.nan, 1.0],
    "inf": [math.inf, 1.0],
    "-inf": [-math.inf, 0.0],
    "inf and nan": [math.inf, math.nan],
    "subnormal": [1e-7, -1e-7, 1e-40, 5e-324],
    "zeros": [-0.0, 0.0],
    "large": [6e4, -6e4],
}
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VALUES)
def test_values_in_every_dtype(name, dtype):
    def loop(make):
        parameters = [nn.Parameter(torch.ones(67, dtype=dtype)) for _ in range(2)]
        optimizer, scaler = torch.optim.SGD(parameters, lr=0.1), make(init_scale=1000.0)
        odd, usual = torch.ones(67, dtype=dtype), torch.full((67,), 3.0, dtype=dtype)
        odd[-len(VALUES[name]) :] = torch.tensor(VALUES[name], dtype=torch.float64).to(dtype)
        for _ in range(2):
            given(scaler, parameters, [odd.clone(), usual.clone()])
            yield attempt(scaler, parameters, optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["nan", "inf", "subnormal", "zeros"])
def test_float16_parameters(name, fused, make_optimizer):
    """The same refusal, or for a fused optimizer the same silence."""

    def loop(make):
        parameter = nn.Parameter(torch.ones(5, dtype=torch.float16))
        optimizer, scaler = make_optimizer([parameter], lr=0.1, fused=fused), make(init_scale=2.0**10)
        grad = torch.full((5,), 1024.0, dtype=torch.float16)
        for step in range(2):
            grad[: len(VALUES[name])] = torch.tensor(VALUES[name]).half() if step else 2.0
            given(scaler, [parameter], [grad.clone()])
            yield attempt(scaler, [parameter], optimizer)

    assert_lockstep(loop)
