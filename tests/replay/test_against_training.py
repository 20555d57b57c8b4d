"""A prediction against the training itself: a run is recorded, another setting replayed over it, and then trained."""

import pytest
import torch

import ampwatch
from ampwatch import spool
from ampwatch.replay import recording_of, what_if

ATTEMPTS = 300


def trained(directory, run, **settings):
    """A float16 training from one seed; its recording."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = ampwatch.GradScaler("cpu", model=model, dir=directory, run=run, **settings)
    for _ in range(ATTEMPTS):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    ampwatch.finish()
    return recording_of(spool.read(directory / run))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs"), "recorded", init_scale=2.0**28, growth_interval=20)


def test_replaying_the_recorded_setting_is_exact(recorded):
    replayed = what_if(recorded, "torch", {"init_scale": 2.0**28, "growth_interval": 20})
    for path in replayed.paths.values():
        assert path.scales(ATTEMPTS).tolist() == recorded.attempts.scale.tolist()


@pytest.mark.parametrize(
    "setting",
    [
        {"init_scale": 2.0**12, "growth_interval": 20},
        {"init_scale": 2.0**16, "growth_interval": 5},
        {"init_scale": 2.0**16, "growth_interval": 100},
        {"init_scale": 2.0**24, "growth_interval": 20, "growth_factor": 4.0},
    ],
    ids=str,
)
def test_what_is_predicted_is_what_then_happens(recorded, setting, tmp_path):
    effects = what_if(recorded, "torch", setting).effects
    skipped = int(trained(tmp_path, "again", **setting).attempts.overflow.sum())
    assert effects["best"].skipped - 2 <= skipped <= effects["worst"].skipped + 2
    assert abs(effects["likely"].skipped - skipped) <= 2 + 0.25 * skipped
