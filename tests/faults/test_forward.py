import torch
from loops import (
    Transformer,
    above_info,
    features,
    findings,
    half,
    mlp,
    recorded,
    regression,
    train,
    worse_than_info,
)
from torch import nn
from torch.nn import functional as F

from ampwatch import spool


def transformer(directory, *, sharp_at=None, steps=30):
    model = Transformer()

    def loss_at(step):
        model.mixers[1].gain = 256.0 if sharp_at is not None and step >= sharp_at else 1.0
        return model.loss(step)

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=steps)


def test_attention_scores_beyond_float16_name_the_attention(tmp_path):
    transformer(tmp_path, sharp_at=17)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("forward_overflow", "fatal", "open")
    assert (finding.first_step, finding.module) == (17, "mixers.1")


def test_it_is_said_within_six_attempts(tmp_path):
    transformer(tmp_path, sharp_at=10, steps=16)
    assert above_info(tmp_path) == [("forward_overflow", "fatal")]


def test_the_same_attention_in_range_is_silent(tmp_path):
    transformer(tmp_path)
    assert findings(tmp_path) == []


def sharp_now_and_then(directory, steps, gain=256.0):
    """Attention that is too sharp in single steps, as a temperature that is drawn anew; answers what was searched."""
    model = Transformer()

    def loss_at(step):
        model.mixers[1].gain = gain if step in steps else 1.0
        return model.loss(step)

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=40)
    batches = [batch for batch in spool.read(directory / "loop") if batch.kind == "events"]
    return [e.attempt for b in batches for e in b.events() if e.type == "forward_search"]


def test_a_loss_that_breaks_now_and_then_is_waited_for(tmp_path):
    searched = sharp_now_and_then(tmp_path, (5, 12, 20, 33))
    assert (min(searched), max(searched)) == (13, 23)  # 7 attempts lay between the two, and 4 more
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("bad_batch", "warning", 5)
    assert (finding.module, finding.evidence[0].attempt) == ("mixers.1", 20)


def test_a_loss_that_is_finite_or_breaks_once_calls_for_no_search(tmp_path):
    assert sharp_now_and_then(tmp_path / "one", (5,)) == []
    assert sharp_now_and_then(tmp_path / "none", (5, 12, 20, 33), gain=1.0) == []
    assert findings(tmp_path / "none") == []


def features_from(directory, big_at, model=None):
    net = mlp()

    def loss_at(step):
        x = features(step) * (1e5 if step >= big_at else 1.0)
        return F.mse_loss(net(x).float().tanh(), features(step).sum(-1, keepdim=True).tanh())

    with recorded(directory) as scaler:
        train(net, scaler(model=net if model else None), loss_at)


def test_features_that_are_not_normalised_overflow_the_first_layer(tmp_path):
    features_from(tmp_path, big_at=12, model=True)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.module, finding.first_step) == ("forward_overflow", "0", 12)


def test_without_a_model_the_cause_is_not_guessed(tmp_path):
    features_from(tmp_path, big_at=12)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step, finding.module) == (
        "nonfinite_forward",
        "fatal",
        12,
        "",
    )


def test_normalised_features_are_silent(tmp_path):
    features_from(tmp_path, big_at=1000, model=True)
    assert findings(tmp_path) == []


def data_with(directory, bad):
    model = mlp()

    def loss_at(step):
        x = features(step)
        if step in bad:
            x[3, 2] = torch.nan
        return F.mse_loss(model(x).float(), torch.zeros(32, 1))

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=25)


def test_one_bad_batch_is_a_warning(tmp_path):
    data_with(tmp_path, bad={9})
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.state, finding.first_step) == (
        "bad_batch",
        "warning",
        "recovered",
        9,
    )


def test_data_that_stays_bad_is_fatal_and_not_called_overflow(tmp_path):
    data_with(tmp_path, bad=set(range(9, 25)))
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("nonfinite_forward", "fatal", 9)
    assert "inputs of the model" in finding.headline


def test_good_data_is_silent(tmp_path):
    data_with(tmp_path, bad=set())
    assert findings(tmp_path) == []


def test_the_scale_is_innocent_of_a_float16_loss_of_zero_probabilities(tmp_path):
    model = mlp(out=2)

    def loss_at(step):
        logits = model(features(step)) * (1.0 if step < 15 else 200.0)
        with half():
            return -(logits.half().softmax(-1).log()).mean().float()

    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model), loss_at)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.first_attempt, finding.first_step) == ("loss_in_fp16", 15, 14)


def test_a_regression_is_silent(tmp_path):
    model = mlp()
    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model), lambda step: regression(model, step))
    assert above_info(tmp_path) == []


def test_weights_of_a_bfloat16_model_overflow_from_the_first_step(tmp_path):
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model), lambda step: regression(model, step), steps=12)
    (finding,) = findings(tmp_path)
    assert (finding.kind, finding.module, finding.first_step) == ("forward_overflow", "2", 0)
    assert any("Nothing has been learned since step 0" in e.text for e in finding.evidence)


class Doubling(nn.Module):
    """Each layer adds its input to itself, with nothing that normalises: 2^20 after 20 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(20))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_residuals_that_double_in_every_layer_overflow_the_model_around_them(tmp_path):
    model = Doubling()

    def loss_at(step):
        x = features(step).half() * (1.0 if step > 9 else 1e-3)
        return model(x).float().square().mean().log1p()

    with recorded(tmp_path) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        train(model, scaler(model=model), loss_at, steps=20, optimizer=optimizer)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.first_attempt, finding.module) == ("forward_overflow", 10, "")
    assert finding.headline.startswith("Values inside the model exceed float16")
    assert finding.confidence == 0.95
