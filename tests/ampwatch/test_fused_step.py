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
