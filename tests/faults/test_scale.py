import pytest
import torch
from loops import (
    Transformer,
    above_info,
    features,
    findings,
    mlp,
    recorded,
    regression,
    train,
    worse_than_info,
)
from torch import nn


def regress(directory, steps=40, lr=1e-3, **scaler_arguments):
    model = mlp()
    with recorded(directory) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        train(
            model,
            scaler(model=model, **scaler_arguments),
            lambda step: regression(model, step),
            steps=steps,
            optimizer=optimizer,
        )


def test_the_descent_from_2_32_is_explained(tmp_path):
    regress(tmp_path, init_scale=2.0**32)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("calibration", "info", "explained")
    assert finding.first_attempt == 0


def test_probes_at_the_ceiling_are_ordinary(tmp_path):
    regress(tmp_path, steps=60, init_scale=2.0**10, growth_interval=4)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("growth_probe", "info", 24)


class Distance(nn.Module):
    """Length of a masked output; without an eps the gradient of sqrt at 0 is infinite, and times 0 it is NaN."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.body, self.eps = mlp(out=4), eps

    def forward(self, x):
        h = self.body(x).float() * (x[:, :1] > 0)  # some rows are padding
        return (h.square().sum(-1) + self.eps).sqrt()


def distance(directory, eps, steps=30):
    model = Distance(eps)
    with recorded(directory) as scaler:
        train(model, scaler(model=model), lambda step: model(features(step)).mean() + 1.0, steps=steps)


def test_a_finite_loss_whose_gradient_never_is_teaches_nothing(tmp_path):
    distance(tmp_path, eps=0.0)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("no_updates", "fatal", 0)


def test_it_is_an_error_as_soon_as_the_scale_is_1(tmp_path):
    distance(tmp_path, eps=0.0, steps=18)
    assert above_info(tmp_path) == [("no_updates", "error")]


def test_the_same_with_an_eps_is_silent(tmp_path):
    distance(tmp_path, eps=1e-6)
    assert above_info(tmp_path) == []


def with_a_minimum(directory, eps, steps=40):
    """The folk rule: whatever happens, the scale stays at 128 and above."""
    model = Distance(eps)
    with recorded(directory) as make:
        scaler, optimizer = make(model=model), torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(steps):
            train(
                model,
                scaler,
                lambda _, step=step: model(features(step)).mean() + 1.0,
                steps=1,
                optimizer=optimizer,
            )
            if scaler.get_scale() < 128.0:
                scaler.update(128.0)


def test_a_minimum_of_the_scale_hides_that_nothing_is_learned(tmp_path):
    with_a_minimum(tmp_path, eps=0.0)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("scale_floor", "fatal", 0)
    assert "held at 2^7" in finding.headline


def test_a_minimum_that_is_never_reached_is_silent(tmp_path):
    with_a_minimum(tmp_path, eps=1e-6)
    assert above_info(tmp_path) == []


def language(directory, scale, steps=12, **scaler_arguments):
    model = Transformer()
    with recorded(directory) as scaler:
        train(model, scaler(model=model, init_scale=scale, **scaler_arguments), model.loss, steps=steps)


def test_a_fixed_scale_too_small_loses_gradients(tmp_path):
    language(tmp_path, 2.0**-13, growth_interval=10**9)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("underflow", "warning", 0)
    assert finding.module.startswith("mixers.")
    assert finding.headline.endswith("the scale does not grow.")


def test_a_scale_that_kills_every_gradient_is_told_too(tmp_path):
    language(tmp_path, 2.0**-30, growth_interval=10**9)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.confidence < 0.9) == ("underflow", True)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**10, 2.0**16])
def test_the_same_at_a_scale_that_serves_is_silent(tmp_path, scale):
    language(tmp_path, scale)
    assert findings(tmp_path) == []


def sharpened(directory, lr, steps=60):
    """Least squares by plain gradient descent: above 2 / curvature every step makes it worse."""
    model = nn.Linear(8, 1)
    x = features(0, rows=64)
    with recorded(directory) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        target = x.sum(-1, keepdim=True)
        train(
            model,
            scaler(model=model),
            lambda step: nn.functional.mse_loss(model(x).float(), target),
            steps=steps,
            optimizer=optimizer,
        )


def test_a_learning_rate_too_large_is_divergence(tmp_path):
    sharpened(tmp_path, lr=0.75)
    (finding,) = [f for f in findings(tmp_path) if f.severity != "info"]
    assert (finding.kind, finding.severity) == ("divergence", "fatal")


def test_a_learning_rate_that_serves_is_silent(tmp_path):
    sharpened(tmp_path, lr=0.1)
    assert above_info(tmp_path) == []


def at_rate(directory, optimizer, lr, body=mlp):
    """The first steps at a learning rate."""
    model = body()
    loss = model.loss if isinstance(model, Transformer) else lambda step: regression(model, step)
    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss, steps=24, optimizer=optimizer(model.parameters(), lr=lr))


@pytest.mark.parametrize(
    ("optimizer", "lr", "body", "said"),
    [
        (
            torch.optim.SGD,
            10.0,
            mlp,
            "Training diverges from step 1",
        ),  # the loss leaps, and stays finite for long
        (torch.optim.AdamW, 10.0, Transformer, "The first step threw the model"),  # it is never finite again
    ],
)
def test_first_steps_that_are_far_too_large_are_divergence(tmp_path, optimizer, lr, body, said):
    at_rate(tmp_path, optimizer, lr, body)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("divergence", "fatal", 1)
    assert finding.headline.startswith(said)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_first_steps_of_an_ordinary_size_are_silent(tmp_path, optimizer):
    at_rate(tmp_path, optimizer, 1e-2)
    assert above_info(tmp_path) == []


def scheduled(directory, factor):
    """A schedule by steps, whose factor is multiplied with the learning rate."""
    model = mlp()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=1e-3
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**10)
        for step in range(36):
            train(model, scaler, lambda _, step=step: regression(model, step), steps=1, optimizer=optimizer)
            schedule.step()
    return [(f.kind, f.severity, f.first_attempt) for f in findings(directory)]


def test_a_schedule_that_has_run_past_its_end_is_told(tmp_path):
    assert scheduled(tmp_path, lambda step: max(0, 1 - step / 10)) == [("no_updates", "warning", 10)]


def test_a_group_at_rate_0_beside_one_that_learns_is_silent(tmp_path):
    assert scheduled(tmp_path, lambda step: max(0.1, 1 - step / 10)) == []


def gust(directory, weight):
    """One batch that counts so much, at a scale that bears it."""
    model = mlp()
    with recorded(directory) as scaler:
        train(
            model,
            scaler(model=model, init_scale=2.0**6),
            lambda step: regression(model, step) * (weight if step == 30 else 1.0),
            steps=40,
        )


def test_a_loss_that_stands_out_without_a_skip_is_a_spike(tmp_path):
    gust(tmp_path, 50.0)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("spike", "info", 30)
    assert finding.state == "recovered"


def test_without_it_nothing_is_said(tmp_path):
    gust(tmp_path, 1.0)
    assert findings(tmp_path) == []


def test_a_loss_summed_over_many_samples_settles_below_1_in_peace(tmp_path):
    model = nn.Linear(8, 1)
    x = features(0, rows=20_000) + 2
    with recorded(tmp_path) as scaler:
        train(
            model,
            scaler(model=model),
            lambda step: (model(x).float() - 3).square().sum(),
            steps=60,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-7),
        )
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity) == ("calibration", "info")
