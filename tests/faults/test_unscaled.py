"""Training without a loss scaler: the optimizer is watched, and faults are named as beside a scaler."""

import pytest
import torch
from loops import above_info, features, findings, mlp, recorded_optimizer, regression, worse_than_info
from torch import nn

import ampwatch
from ampwatch.diagnosis import diagnose_run


def train(directory, loss_at, *, model=None, steps=40, lr=1e-3, dtype=torch.bfloat16, clear=True, named=True):
    """The loop that everyone writes; `loss_at(model, step)` runs under autocast."""
    model = model or mlp()
    with recorded_optimizer(directory) as watched:
        optimizer = watched(torch.optim.AdamW(model.parameters(), lr=lr), model=model if named else None)
        for step in range(steps):
            if clear:
                optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
                loss = loss_at(model, step)
            loss.backward()
            ampwatch.log(loss=loss)
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("named", [True, False])
def test_a_healthy_run_is_silent(tmp_path, dtype, named):
    train(tmp_path, regression, dtype=dtype, named=named, steps=70)
    assert findings(tmp_path) == []
    assert diagnose_run(tmp_path).verdict().sentence == "Healthy: 70 steps taken, without a loss scaler."


@pytest.mark.parametrize("named", [True, False])
def test_float16_without_a_scaler(tmp_path, named):
    train(tmp_path, regression, dtype=torch.float16, named=named)
    assert above_info(tmp_path) == [("missing_scaler", "error")]


def test_a_batch_that_is_not_finite_poisons_the_weights_at_once(tmp_path):
    def loss_at(model, step):
        return regression(model, step) * (torch.nan if step == 12 else 1.0)

    train(tmp_path, loss_at)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("weights_poisoned", "fatal", 12)
    assert finding.tensor == "0.weight"
    assert any("without a scaler none is skipped" in e.text for e in finding.evidence)


def test_without_a_model_and_a_loss_it_is_the_gradients_that_tell(tmp_path):
    model = mlp()
    with recorded_optimizer(tmp_path) as watched:
        optimizer = watched(torch.optim.SGD(model.parameters(), lr=1e-3))
        for step in range(20):
            optimizer.zero_grad()
            (regression(model, step) * (torch.inf if step == 9 else 1.0)).backward()
            optimizer.step()
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("weights_poisoned", "fatal", 9)


def test_a_loss_that_is_not_finite_and_not_stepped_is_a_bad_batch(tmp_path):
    model = mlp()
    with recorded_optimizer(tmp_path) as watched:
        optimizer = watched(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
        for step in range(30):
            optimizer.zero_grad()
            loss = regression(model, step)
            loss.backward()
            ampwatch.log(loss=torch.nan if step == 12 else loss)
            optimizer.step()
    assert above_info(tmp_path) == [("bad_batch", "warning")]


def test_a_learning_rate_far_too_high_is_a_divergence(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    with recorded_optimizer(tmp_path) as watched:
        optimizer = watched(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
        for step in range(160):
            optimizer.param_groups[0]["lr"] = 1e-3 if step < 60 else 0.35
            optimizer.zero_grad()
            loss = regression(model, step)
            loss.backward()
            ampwatch.log(loss=loss)
            optimizer.step()
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity) == ("divergence", "fatal")
    assert 60 <= finding.first_attempt < 80


def test_gradients_that_are_not_cleared(tmp_path):
    train(tmp_path, regression, clear=False)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity) == ("grads_not_cleared", "error")
    assert "each step is made of all gradients so far" in finding.headline


def test_an_optimizer_that_holds_another_model(tmp_path):
    other = mlp()
    with recorded_optimizer(tmp_path) as watched:
        optimizer = watched(torch.optim.SGD(other.parameters(), lr=1e-3), model=mlp())
        model = mlp()
        for step in range(10):
            optimizer.zero_grad()
            regression(model, step).backward()
            optimizer.step()
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("no_gradients", "error", 1)


def test_one_step_without_gradients_may_be_how_a_loop_begins(tmp_path):
    model = mlp()
    with recorded_optimizer(tmp_path) as watched:
        optimizer = watched(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
        optimizer.step()
        for step in range(10):
            optimizer.zero_grad()
            regression(model, step).backward()
            optimizer.step()
    assert above_info(tmp_path) == []


def test_parameters_in_bfloat16_are_right_without_a_scaler(tmp_path):
    model = mlp().bfloat16()
    with recorded_optimizer(tmp_path) as watched:
        optimizer = watched(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model)
        for step in range(30):
            optimizer.zero_grad()
            x = features(step).bfloat16()
            (model(x) - x.sum(1, keepdim=True)).float().square().mean().backward()
            optimizer.step()
    assert findings(tmp_path) == []


def test_a_gan_in_two_optimizers(tmp_path):
    maker, critic = nn.Linear(8, 8), mlp()
    with recorded_optimizer(tmp_path) as watched:
        optimizers = [watched(torch.optim.Adam(m.parameters(), 1e-3), model=m) for m in (critic, maker)]
        for step in range(40):
            for optimizer, sign in zip(optimizers, (1, -1), strict=True):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    fake = critic(maker(features(step))).float().mean()
                    loss = sign * (fake - critic(features(step + 1000)).float().mean())
                loss.backward()
                ampwatch.log(loss=loss)
                optimizer.step()
    assert findings(tmp_path) == []
