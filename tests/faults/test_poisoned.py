"""Parameters and buffers that became inf or NaN, and what made them so."""

import torch
from loops import above_info, features, mlp, recorded, regression, train, worse_than_info
from torch import nn
from torch.nn import functional as F


def written_by_hand(directory, value, steps=30):
    """A loop that clamps a weight by a bound of its own, which at step 12 is not a number."""
    model = mlp()
    with recorded(directory) as make:
        scaler, optimizer = make(model=model), torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(steps):
            train(model, scaler, lambda _, step=step: regression(model, step), steps=1, optimizer=optimizer)
            with torch.no_grad():
                model[2].weight[0, 3] *= value if step == 12 else 1.0


def test_a_weight_written_by_hand_is_named(tmp_path):
    written_by_hand(tmp_path, torch.nan)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("weights_poisoned", "fatal", "open")
    assert (finding.tensor, finding.first_attempt) == ("2.weight", 13)


def test_a_weight_that_stays_a_number_is_silent(tmp_path):
    written_by_hand(tmp_path, 0.5)
    assert above_info(tmp_path) == []


def normalised(directory, bad, steps=30):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def loss_at(step):
        x = features(step)
        if step == bad:
            x[2, 1] = torch.inf
        return F.mse_loss(model(x).float(), features(step).sum(-1, keepdim=True))

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=steps)


def test_one_bad_batch_poisons_batch_norm(tmp_path):
    normalised(tmp_path, bad=11)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("buffers_poisoned", "fatal", "open")
    assert (finding.tensor, finding.module, finding.first_attempt) == ("1.running_mean", "1", 11)
    assert any("for one attempt only" in e.text for e in finding.evidence)


def test_batch_norm_on_good_batches_is_silent(tmp_path):
    normalised(tmp_path, bad=None)
    assert above_info(tmp_path) == []


def through_the_dead_zone(directory, broken, steps=160):
    """NaN for a long time, then healthy data: the scale has no reciprocal any more."""
    model = mlp()

    def loss_at(step):
        return regression(model, step) * (torch.nan if step < broken else 1.0)

    with recorded(directory) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        train(model, scaler(model=model), loss_at, steps=steps, optimizer=optimizer)


def test_the_dead_zone_is_told_before_it_is_reached(tmp_path):
    through_the_dead_zone(tmp_path, broken=100, steps=100)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("dead_zone", "fatal", "open")
    assert finding.first_attempt == 0
    assert "after 44 more skips" in finding.headline


def test_before_2_to_the_minus_64_it_is_the_loss_that_is_told(tmp_path):
    through_the_dead_zone(tmp_path, broken=60, steps=60)
    assert above_info(tmp_path) == [("nonfinite_forward", "fatal")]


def test_the_first_healthy_batch_in_the_dead_zone_destroys_the_weights(tmp_path):
    through_the_dead_zone(tmp_path, broken=146)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.first_attempt) == ("weights_poisoned", 146)
    assert any("2^-130" in e.text for e in finding.evidence)
