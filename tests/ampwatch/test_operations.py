"""Losses and softmaxes of real passes under float16 autocast on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampwatch.operations import OperationSearch

from .watched import IDS, Transformer, mlp, read

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    torch.manual_seed(0)


def half():
    return torch.autocast("cpu", dtype=torch.float16)


def searched(model, loss_of, *inputs):
    """What is seen of one pass, and its loss."""
    observer = OperationSearch(model)
    observer.arm()
    with half():
        loss = loss_of(model(*inputs))
    observer.pass_ended([loss])
    observer.disarm()
    return read(observer)["loss"]


def test_operations_between_output_and_loss_are_named_nearest_the_loss_first():
    seen = searched(mlp(), lambda y: -(y * 500).softmax(-1).log().mean().float(), torch.randn(4, 16))
    assert seen == {
        "finite": False,
        "inputs_finite": True,
        "float16": ["Mean", "Log", "Softmax", "Mul"],
    }


def test_a_loss_in_float32_has_none():
    seen = searched(mlp(), lambda y: y.float().square().mean(), torch.randn(4, 16))
    assert seen == {"finite": True, "inputs_finite": True, "float16": []}


def test_outputs_that_are_not_finite_are_told():
    seen = searched(mlp(), lambda y: y.float().mean(), torch.full((4, 16), torch.inf))
    assert (seen["finite"], seen["inputs_finite"]) == (False, False)


def test_a_loss_that_is_not_made_of_the_model_is_not_known():
    free = torch.ones((), requires_grad=True)
    assert searched(mlp(), lambda _: free * torch.nan, torch.randn(4, 16))["inputs_finite"] is None


class Rows(nn.Module):
    """A softmax over what it is given."""

    def forward(self, scores):
        return scores.softmax(-1)


@pytest.mark.parametrize(
    ("row", "seen"),
    [
        ([0.0, -torch.inf], None),
        ([-torch.inf, -torch.inf], (1, 0, 0, 0)),
        ([torch.inf, -torch.inf], (0, 1, 1, 0)),
        ([torch.inf, torch.nan], (0, 1, 1, 0)),
        ([torch.nan, 0.0], (0, 1, 0, 0)),
        ([torch.nan, -torch.inf], (0, 1, 0, 1)),
    ],
)
def test_rows_of_a_softmax(row, seen):
    model, observer = Rows(), None
    observer = OperationSearch(model)
    observer.arm()
    scores = torch.tensor([[1.0, 2.0], row], requires_grad=True)
    observer.pass_ended([model(scores).sum()])
    observer.disarm()
    names = ("masked", "overflowed", "infinite", "undefined")
    expected = seen and {"module": "", "rows": 2, **dict(zip(names, seen, strict=True))}
    assert read(observer)["softmax"] == expected


class Raises(nn.Module):
    """Fails in the middle of its forward pass."""

    def forward(self, x):
        raise ValueError("no")


def test_a_pass_that_raises_leaves_no_mode_behind():
    model = nn.Sequential(nn.Linear(8, 8), Raises())
    observer = OperationSearch(model)
    observer.arm()
    with pytest.raises(ValueError, match="no"):
        model(torch.randn(2, 8))
    assert _get_current_dispatch_mode_stack() == []
    observer.disarm()


def test_the_pass_that_is_watched_computes_the_same_bits():
    model = Transformer(1.0, 1.0)
    with half():
        plain = model(IDS)["logits"]
    observer = OperationSearch(model)
    observer.arm()
    with half():
        assert torch.equal(model(IDS)["logits"], plain)
    observer.disarm()
