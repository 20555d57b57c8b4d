"""A cause whose skips bring the loss scale to its end: the cause is the headline, and what came of it its evidence."""

import torch
from loops import features, half, recorded, train, worse_than_info
from torch import nn
from torch.nn import functional as F


def labelled(step):
    x = features(step)
    return x, x[:, :4].argmax(1)


def perceptron(outputs):
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, outputs))


def alone(directory, steps):
    """One scaler and two optimizers; the gradients of one are infinite in each attempt: a root at 0."""
    actor, critic = perceptron(4), perceptron(1)
    optimizers = [torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.RMSprop(critic.parameters(), 1e-3)]
    with recorded(directory) as make:
        scaler = make(model=nn.ModuleDict({"actor": actor, "critic": critic}))
        for step in range(steps):
            x, y = labelled(step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with half():
                value = critic(x).float()
                loss = F.cross_entropy(actor(x), y) + (value - value.detach()).abs().sqrt().mean()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()


def test_a_starved_optimizer_is_named_near_the_dead_zone(tmp_path):
    alone(tmp_path, steps=90)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("many_optimizers", "fatal", 0)
    assert finding.headline.startswith("RMSprop (optimizer 1) is skipped in every attempt from step 0 on")
    assert finding.advice[0].text.startswith("Stop now")
    assert [(link.kind, link.attempt) for link in finding.chain] == [
        ("many_optimizers", 0),
        ("dead_zone", 80),
    ]


def test_a_starved_optimizer_is_named_after_its_scale_destroyed_the_weights(tmp_path):
    alone(tmp_path, steps=190)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("many_optimizers", "fatal", "open")
    assert finding.headline.startswith("RMSprop (optimizer 1) is skipped in every attempt from step 0 on")
    assert finding.advice[0].text.startswith("Stop, and go back to the last checkpoint from before step 144")
    assert not any(
        "nothing is learned:" in e.text or "Nothing has been learned" in e.text for e in finding.evidence
    )
    assert any(e.tensor.startswith("critic.") for e in finding.evidence)
    assert [(link.kind, link.attempt) for link in finding.chain][:3] == [
        ("many_optimizers", 0),
        ("dead_zone", 80),
        ("weights_poisoned", 144),
    ]


def test_nan_gradients_of_a_finite_loss_are_told_with_the_way_to_find_them(tmp_path):
    model = perceptron(4)

    def loss_at(step):
        x, y = labelled(step)
        x[5] *= step < 30
        length = F.linear(x, model[0].weight[:2]).float().square().sum(1).sqrt()
        return F.cross_entropy(model(x).float(), y) + 0.01 * length.mean()

    with recorded(tmp_path) as make:
        train(model, make(model=model), loss_at, steps=120)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.first_attempt) == ("dead_zone", 30)
    assert any(e.tensor == "0.weight" and e.attempt == 30 for e in finding.evidence)
    assert any("detect_anomaly" in advice.code for advice in finding.advice)


class Wide(nn.Module):
    """Squares what it computes, in float16, and normalises it."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(8, 32), nn.Linear(32, 4), 1.0

    def forward(self, x):
        hidden = (self.first(x) * self.gain).half()
        return self.last(F.layer_norm(hidden**2, (32,)))


def test_a_module_that_makes_nan_is_the_headline_of_the_scale_it_brings_down(tmp_path):
    model = nn.Sequential(Wide())

    def loss_at(step):
        x, y = labelled(step)
        model[0].gain = 1.0 if step < 20 else 3e3
        return F.cross_entropy(model(x), y)

    with recorded(tmp_path) as make:
        train(model, make(model=model), loss_at, steps=120)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.module) == ("nonfinite_forward", "fatal", "0")
    assert finding.advice[0].text.startswith("Stop now")
    assert [link.kind for link in finding.chain] == ["nonfinite_forward", "dead_zone"]


def focal(directory, steps):
    """A focal loss in float16, that breaks more and more often as the model grows sure."""
    torch.manual_seed(1)
    model = perceptron(1)

    def loss_at(_):
        x = torch.randn(32, 8)
        y = (x[:, 0] > 0).float()
        p = model(x).squeeze(1).sigmoid()
        return -(y * p.log() * (1 - p) ** 2 + (1 - y) * (1 - p).log() * p**2).mean()

    with recorded(directory) as make:
        optimizer = torch.optim.Adam(model.parameters(), 2e-2)
        train(model, make(model=model), loss_at, steps=steps, optimizer=optimizer)


def test_a_loss_that_breaks_again_and_again_has_not_recovered_once(tmp_path):
    focal(tmp_path, steps=130)
    (finding,) = worse_than_info(tmp_path)
    assert finding.kind == "loss_in_fp16"
    assert "It recovered at" not in finding.headline


def test_a_loss_in_float16_is_the_headline_of_the_weights_that_its_scale_destroyed(tmp_path):
    focal(tmp_path, steps=300)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.state) == ("loss_in_fp16", "fatal", "open")
    assert finding.advice[0].text.startswith("Stop, and go back to the last checkpoint")
    assert "go back to a checkpoint from before" in finding.headline
    began = [link.kind for link in finding.chain]
    assert began.index("loss_in_fp16") < began.index("dead_zone") < began.index("weights_poisoned")
