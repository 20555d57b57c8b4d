"""Gradients that the loop divides by the scale, as the scaler does."""

import pytest
import torch
from loops import half, mlp, recorded, regression, told, train, worse_than_info
from torch import nn


def trained(directory, before=None, after=None, steps=14, init_scale=2.0**10, accumulate=1, start=0, lr=1e-3):
    """A loop that does something to its gradients before or after unscale_()."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=init_scale)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(accumulate):
                with half():
                    loss = regression(model, step + part) / accumulate
                scaler.scale(loss).backward()
            if before and step >= start:
                before(model, scaler)
            if after:
                scaler.unscale_(optimizer)
                if step >= start:
                    after(model, scaler)
            scaler.step(optimizer)
            scaler.update()


def divide(model, scaler):
    for p in model.parameters():
        p.grad /= scaler.get_scale()


def divide_data(model, scaler):
    for p in model.parameters():
        p.grad.data.mul_(1 / scaler.get_scale())


def clip(model, scaler):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("way", [{"before": divide}, {"before": divide_data}, {"after": divide}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_that_are_divided_twice_from_the_first_step_on(tmp_path, way, accumulate):
    trained(tmp_path, **way, accumulate=accumulate)
    assert told(tmp_path) == [("scaler_bypassed", "error", 4, "")]


def test_they_are_told_behind_a_descent_of_the_scale(tmp_path):
    trained(tmp_path, before=divide, init_scale=2.0**24, steps=20)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity) == ("scaler_bypassed", "error")
    assert "the loop divides gradients of SGD by the loss scale" in finding.headline


@pytest.mark.parametrize("lr", [1e-3, 0.15])
def test_gradients_that_are_divided_twice_from_the_middle_of_a_run_on(tmp_path, lr):
    """Also where the norm is falling by itself, and where what is left looks as if it underflowed."""
    trained(tmp_path, before=divide, steps=60, init_scale=2.0**16, start=30, lr=lr)
    assert told(tmp_path) == [("scaler_bypassed", "error", 30, "")]


def test_those_that_are_from_then_on_behind_unscale_(tmp_path):
    """No norm tells it: they are looked at in 4 of 64 windows."""
    trained(tmp_path, after=divide, steps=80, start=20)
    assert told(tmp_path) == [("scaler_bypassed", "error", 68, "")]


def test_a_norm_that_falls_steeply_by_itself_is_silent(tmp_path):
    """A loss that is divided by 2^16 from its 30th step on."""

    def loss(step):
        return regression(model, step) / (1 if step < 30 else 2.0**16)

    model = mlp()
    with recorded(tmp_path) as make:
        train(model, make(model=model), loss, steps=60)
    assert told(tmp_path) == []


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_clip_after_unscaling_and_nothing_at_all_are_silent(tmp_path, accumulate):
    trained(tmp_path / "clip", after=clip, accumulate=accumulate)
    trained(tmp_path / "plain", accumulate=accumulate)
    assert told(tmp_path / "clip") == told(tmp_path / "plain") == []


def test_a_mean_over_as_many_as_the_scale_is_once_is_silent(tmp_path):
    """A sum over 128 that the loop divides at the end, at a scale of 128, which then moves on."""

    def mean(model, scaler):
        for p in model.parameters():
            p.grad /= 100

    trained(tmp_path, before=mean, init_scale=2.0**7)
    assert told(tmp_path) == []


def test_no_parameter_is_kept_beyond_a_window(tmp_path):
    """Nor where the optimizer is not stepped in it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with recorded(tmp_path) as make:
        scaler = make(init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            with half():
                loss = regression(model, step)
            scaler.scale(loss).backward()
            if step < 5:
                scaler.step(optimizer)
            scaler.update(2.0**10)
        optimizer.zero_grad()
        other = nn.Parameter(model[0].weight.detach() + 1)
        torch.utils.swap_tensors(
            model[0].weight, other
        )  # torch refuses it for a tensor that is held elsewhere
    assert model[0].weight is not other


def scaled(directory, times_scale, init_scale=2.0**16, steps=30):
    """A loop whose loss is put through something before scale()."""
    model = mlp()
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=init_scale)
        train(model, scaler, lambda step: times_scale(regression(model, step), step, scaler), steps=steps)


def test_a_loss_that_is_scaled_by_hand_from_the_first_step_on(tmp_path):
    scaled(tmp_path, lambda loss, _, scaler: loss * scaler.get_scale())
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("scaler_bypassed", "error", 1)
    assert "the loss is multiplied by the loss scale before scale()" in finding.headline
    assert finding.evidence[0].text.startswith("Through 6 skipped attempts in a row")


@pytest.mark.parametrize("factor", [1.0, 0.75, 0.6])
def test_a_loss_that_falls_while_the_scale_comes_down_is_healthy(tmp_path, factor):
    """By itself, as one whose weight is lowered at each attempt, at 14 skipped attempts and more."""
    scaled(tmp_path, lambda loss, step, _: loss * factor ** min(step, 20), init_scale=2.0**32)
    assert told(tmp_path) == []
