"""Gradients that are exactly zero: all of them, or always those of the same layer."""

import pytest
import torch
from loops import Transformer, features, findings, mlp, recorded, recorded_optimizer, regression, train
from torch import nn


def said(directory):
    """(kind, severity, first attempt, tensor) of all that is told but the descent of the scale."""
    quiet = ("calibration", "growth_probe")
    return [
        (f.kind, f.severity, f.first_attempt, f.tensor) for f in findings(directory) if f.kind not in quiet
    ]


def trained(directory, loss_at, model=None, steps=40, **arguments):
    model = model or mlp()
    with recorded(directory) as make:
        train(model, make(model=model, **arguments), lambda step: loss_at(model, step), steps=steps)


def averaged(count):
    """The mean of squares by a count that is kept in float16, as in a loss whose every number is."""
    factor = 1 / torch.tensor(count, dtype=torch.float16)
    return lambda model, step: regression(model, step) * 32 * factor


def test_an_average_over_more_than_float16_can_count_is_zero_throughout(tmp_path):
    trained(tmp_path / "fault", averaged(70_000.0))
    trained(tmp_path / "twin", averaged(60_000.0))
    (finding,) = findings(tmp_path / "fault")
    assert (finding.kind, finding.severity, finding.first_attempt) == ("no_updates", "error", 0)
    assert finding.headline == (
        "Every gradient has been exactly zero since step 0, in 40 attempts, and so is the loss: nothing is learned. It goes "
        "on until something that is not zero reaches the weights."
    )
    assert said(tmp_path / "twin") == []


@pytest.mark.parametrize(("steps", "expected"), [(20, [("no_updates", "error", 0, "")]), (19, [])])
def test_it_takes_twenty_attempts(tmp_path, steps, expected):
    trained(tmp_path, averaged(70_000.0), steps=steps)
    assert said(tmp_path) == expected


def test_an_output_that_a_clamp_holds_at_its_end(tmp_path):
    """A constant loss, and no way back."""

    def clamped(model, step):
        return (model(features(step)).float() + (100.0 if step >= 12 else 0.0)).clamp(-5, 5).square().mean()

    trained(tmp_path, clamped)
    assert said(tmp_path) == [("no_updates", "error", 12, "")]


def test_a_mask_that_is_empty_from_a_step_on_may_be_a_margin_that_is_kept(tmp_path):
    def masked(model, step):
        return (regression(model, step) * (step < 12)).relu()

    trained(tmp_path, masked)
    assert said(tmp_path) == [("no_updates", "info", 12, "")]


def test_a_loss_that_waits_beside_one_that_learns_is_info(tmp_path):
    """A critic whose weight is 0 until its time has come."""
    model = nn.ModuleList([mlp(), mlp()])
    with recorded(tmp_path) as make:
        scaler, optimizers = make(model=model), [torch.optim.Adam(m.parameters(), 1e-3) for m in model]
        for step in range(40):
            for weight, each, optimizer in zip((1.0, 0.0), model, optimizers, strict=True):
                train(
                    each,
                    scaler,
                    lambda _, m=each, w=weight, s=step: regression(m, s) * w,
                    steps=1,
                    optimizer=optimizer,
                )
    assert said(tmp_path) == [("no_updates", "info", 1, "")]


def test_without_a_scaler_and_a_loss_it_is_told_all_the_same(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with recorded_optimizer(tmp_path) as watched:
        watched(optimizer, model=model)
        for step in range(30):
            optimizer.zero_grad()
            (regression(model, step) * 0).backward()
            optimizer.step()
    assert said(tmp_path) == [("no_updates", "error", 0, "")]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, whose second factor starts at zero, and a head."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.frozen = nn.Linear(8, 16).requires_grad_(False)
        self.a, self.b = nn.Linear(8, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.head, self.weight = nn.Linear(16, 1), weight
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.head((self.frozen(x) + self.weight * self.b(self.a(x))).relu())


@pytest.mark.parametrize(
    ("weight", "expected"), [(1.0, []), (0.0, [("no_gradients", "info", 9, "a.weight")])]
)
def test_an_adapter_that_starts_at_zero_and_one_that_is_multiplied_by_zero(tmp_path, weight, expected):
    trained(tmp_path, regression, Adapted(weight), steps=70, init_scale=2.0**10)
    assert said(tmp_path) == expected


def dead(directory, bias):
    """A middle layer whose units fire or do not."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(model[0].bias, bias)
    trained(directory, regression, model, steps=70, init_scale=2.0**10)
    return said(directory)


@pytest.mark.parametrize(
    ("bias", "expected"), [(-100.0, [("no_gradients", "info", 9, "0.weight")]), (0.0, [])]
)
def test_a_layer_of_units_that_are_all_dead(tmp_path, bias, expected):
    assert dead(tmp_path, bias) == expected


def test_rows_that_are_not_used_are_no_tensor_of_zeros(tmp_path):
    model = Transformer()
    with recorded(tmp_path) as make:
        train(model, make(model=model, init_scale=2.0**10), model.loss, steps=70)
    assert said(tmp_path) == []
