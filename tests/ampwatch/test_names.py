"""Names are those of the model as it was written, whatever wraps it or parts of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ampwatch.names import Name, buffers_of, modules_of, names_of, parameters_of


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


WRAPPED = {
    "none": model,
    "compiled": lambda: torch.compile(model(), backend="eager"),
    "data parallel": lambda: nn.DataParallel(model()),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.BatchNorm1d(3)),
    "all": lambda: nn.DataParallel(torch.compile(checkpoint_wrapper(model()), backend="eager")),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_wrappers_are_left_out(wrapped):
    made = WRAPPED[wrapped]()
    assert [name for name, _ in parameters_of(made)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert next(buffers_of(made))[0] == "1.running_mean"
    assert {name for name, _ in modules_of(made)} == {"", "0", "1"}
    assert type(dict(modules_of(made))["0"]) is nn.Linear
    assert next(iter(names_of(made).values())) == Name("0.weight", "0", "Linear")


def test_a_module_of_the_authors_own_keeps_its_name():
    inner = nn.Module()
    inner.module = nn.Linear(1, 1)
    assert [name for name, _ in parameters_of(inner)] == ["module.weight", "module.bias"]
