"""What is seen of a fused optimizer's step."""

import math

import pytest
import torch
from torch import nn

from ampwatch.fused_step import FusedStep


@pytest.mark.parametrize(
    ("before", "after", "told"), [(1.0, 2.0, 1.0), (1.0, 1.0, None), (math.nan, math.nan, None)]
)
def test_an_overflow_is_applied_where_weights_that_were_numbers_change(before, after, told):
    parameter = nn.Parameter(torch.tensor([before, 1.0]))
    parameter.grad = torch.tensor([math.inf, 1.0])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    step = FusedStep(optimizer, 0, torch.tensor(2.0**16), is_unscaled=False)
    with torch.no_grad():
        parameter[0] = after
    seen = step.ended(torch.ones(()))
    assert seen.decode(seen.values.numpy()).get("moved") == told


def counts(state, grad, skips):
    state["step"] = state.get("step", torch.zeros(())) + (0 if skips else 1)


def takes_up(state, grad, skips):
    moment = state.get("momentum", torch.zeros_like(grad))
    state["momentum"] = moment if skips else moment.lerp(grad, 0.25)


def copies(state, grad, skips):
    state["begun_at"] = torch.full_like(grad, 3.0)


@pytest.mark.parametrize(
    ("change", "begun", "skips", "told"),
    [
        (counts, False, False, (0.0, 1.0)),  # replaced, not counted in place
        (counts, True, False, (0.0, 1.0)),
        (takes_up, True, False, (math.inf, 0.0)),  # from 0 a quarter of the way to inf
        (takes_up, False, False, (math.inf, 0.0)),  # there for the first time
        (copies, False, False, None),
        (counts, False, True, None),
        (counts, True, True, None),
        (takes_up, False, True, None),
        (takes_up, True, True, None),
    ],
)
def test_an_overflow_is_applied_where_the_state_changes_and_weights_do_not(change, begun, skips, told):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if begun:
        change(optimizer.state[parameter], torch.zeros(2), skips=False)
    step = FusedStep(optimizer, 0, torch.tensor(2.0**16), is_unscaled=False)
    change(optimizer.state[parameter], parameter.grad, skips=skips)
    seen = step.ended(torch.ones(()))
    data = seen.decode(seen.values.numpy())
    assert ((data["state"], data["count"]) if data else None) == told


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_torchs_own_fused_optimizers_leave_no_trace_of_a_skipped_step(kind):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = kind([parameter], lr=0.1, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.ones(())
    for gradient in (math.inf, 1.0, math.nan):
        parameter.grad = torch.full((4,), gradient)
        optimizer.found_inf = torch.tensor(0.0 if gradient == 1.0 else 1.0)
        step = FusedStep(optimizer, 0, torch.tensor(2.0), is_unscaled=False)
        optimizer.step()
        seen = step.ended(optimizer.found_inf)
        assert seen.decode(seen.values.numpy()) == {}
    assert optimizer.state[parameter]["step"].item() == 1.0
