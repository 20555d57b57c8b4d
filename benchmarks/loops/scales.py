"""Faults, and healthy events, of the scale itself and of what a scale can do nothing about."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .forward import descend
from .lab import Happened, Lab, faulty, half
from .models import Causal, Dreamer, Glyphs, Perceptron, Reader, Tagger, Tower, curve, pictures, sentences


@faulty("calibration", "info")
def autoencoder_from_2_to_the_30(lab: Lab, fault: bool) -> Happened:
    model = Perceptron(16, 24, 4, 24, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**30 if fault else 2.0**8)
    for _ in lab.steps(90):
        x = torch.randn(32, 4).repeat(1, 4)
        with half():
            loss = F.mse_loss(model(x).float(), x)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("calibration", "info")
def tagger_from_2_to_the_40(lab: Lab, fault: bool) -> Happened:
    model = Tagger()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.03)
    scaler = lab.scaler(model, init_scale=2.0**40 if fault else 2.0**8)
    for _ in lab.steps(70):
        tokens = sentences(8)
        with half():
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), (tokens % 4).flatten())
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("growth_probe", "info")
def sawtooth_of_a_regression(lab: Lab, fault: bool) -> None:
    model = Perceptron(8, 32, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**14, growth_interval=15 if fault else 2000)
    for _ in lab.steps(150):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)


@faulty("growth_probe", "info")
def sawtooth_of_a_language(lab: Lab, fault: bool) -> None:
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    scaler = lab.scaler(model, growth_interval=20 if fault else 2000)
    for _ in lab.steps(140):
        tokens = sentences(16)
        with half():
            loss = F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        descend(lab, scaler, optimizer, loss)


def after_the_fall(path: list[float], losses: list[float], onset: int) -> Happened:
    """The verdict is due five attempts after the first skip at a loss that is ten times the first."""
    grown = next((i for i in range(onset, len(losses)) if not losses[i] < 10 * losses[0]), len(losses))
    fall = next((i for i in range(grown, len(path) - 1) if path[i + 1] < path[i]), None)
    return Happened(onset, None if fall is None else fall + 5)


@faulty("divergence", "fatal")
def rate_ten_times_too_high(lab: Lab, fault: bool) -> Happened:
    """A step schedule that multiplies instead of dividing."""
    onset, path = 50, []
    model = Perceptron(8, 24, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [onset], gamma=20.0 if fault else 0.1)
    scaler = lab.scaler(model)
    for _ in lab.steps(110):
        x, y = curve(32)
        path.append(scaler.get_scale())
        with half():
            loss = F.mse_loss(model(x * 2).float(), y)
        descend(lab, scaler, optimizer, loss)
        schedule.step()
    return after_the_fall([*path, scaler.get_scale()], lab.losses, onset)


@faulty("divergence", "fatal")
def values_that_chase_themselves(lab: Lab, fault: bool) -> Happened:
    """TD learning with a discount above 1: the target runs ahead of the estimate."""
    path = []
    model = Perceptron(6, 24, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = lab.scaler(model)
    for _ in lab.steps(140):
        state = torch.randn(32, 6)
        path.append(scaler.get_scale())
        with half():
            with torch.no_grad():
                target = state[:, :1].abs() + (2.5 if fault else 0.6) * model(state * 0.9).float()
            loss = F.mse_loss(model(state).float(), target)
        descend(lab, scaler, optimizer, loss)
    return after_the_fall([*path, scaler.get_scale()], lab.losses, 0)


@faulty("divergence", "fatal")
def linear_model_past_its_limit(lab: Lab, fault: bool) -> Happened:
    """Plain descent on a least-squares problem with a rate just above 2 / curvature, from some step on."""
    onset, path = 40 + lab.seed % 5, []
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    scaler = lab.scaler(model)
    mixing = torch.randn(16, 4)
    for step in lab.steps(120):
        x = torch.randn(128, 16)
        path.append(scaler.get_scale())
        if step == onset and fault:
            optimizer.param_groups[0]["lr"] = 5.0
        with half():
            loss = F.mse_loss(model(x).float(), x @ mixing)
        descend(lab, scaler, optimizer, loss)
    return after_the_fall([*path, scaler.get_scale()], lab.losses, onset)


def distances(x: Tensor, safe: bool) -> Tensor:
    """Between all pairs of points; the root of the zero on the diagonal has an infinite slope."""
    squares = (x[:, None] - x[None]).square().sum(-1)
    if safe:
        return (squares + 1e-6).sqrt()
    return squares.sqrt()


def embed(lab: Lab, fault: bool, steps: int, floor: float = 0.0, init: float = 2.0**16) -> None:
    """Multidimensional scaling: points in the plane that keep the distances of points in space."""
    model = Perceptron(6, 24, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = lab.scaler(model, init_scale=init)
    for _ in lab.steps(steps):
        x = torch.randn(16, 6)
        with half():
            plane = model(x)
            loss = (distances(plane.float(), safe=not fault) - torch.cdist(x, x)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < floor:
            scaler.update(floor)
        lab.note(loss)


@faulty("no_updates", "error", "fatal")
def root_of_zero(lab: Lab, fault: bool) -> Happened:
    """Loss finite, gradients NaN at every scale: sqrt at 0."""
    embed(lab, fault, 50)
    return Happened(0, by=17)


@faulty("no_updates", "error", "fatal")
def logarithm_behind_a_where(lab: Lab, fault: bool) -> Happened:
    """`where` hides log of a negative number in the loss, not in its gradient."""
    model = Glyphs()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=1024.0)
    for _ in lab.steps(40):
        x, y = pictures(16)
        with half():
            out = model(x).float()
            bonus = torch.where(out > 0, (out if fault else out.clamp(min=1e-6)).sqrt(), torch.zeros(()))
            loss = F.cross_entropy(out, y) - 0.01 * bonus.mean()
        descend(lab, scaler, optimizer, loss)
    return Happened(0, by=11)


@faulty("dead_zone", "fatal")
def root_of_zero_overnight(lab: Lab, fault: bool) -> Happened:
    """The same, for so long that the scale nears 2^-128, where 1/S is infinite."""
    embed(lab, fault, 125)
    return Happened(80, by=110)


@faulty("scale_floor", "fatal")
def floor_of_128(lab: Lab, fault: bool) -> Happened:
    """The user keeps the scale from falling below 128, as a forum advised; every attempt is skipped."""
    embed(lab, fault, 45, floor=128.0)
    return Happened(9, by=24)


@faulty("summed_loss", "info")
def sum_over_all_tokens(lab: Lab, fault: bool) -> Happened:
    """A squared error summed over many outputs: the scale settles below 1 and the loss keeps falling."""
    model = nn.Linear(16, 32)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    scaler = lab.scaler(model)
    mixing = 60 * torch.randn(16, 32)
    for _ in lab.steps(150):
        x = torch.randn(2048, 16)
        with half():
            error = (model(x).float() - x @ mixing).square()
            loss = error.sum() if fault else error.mean() / 100
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("underflow", "warning", within=10)
def scale_of_one_for_a_small_loss(lab: Lab, fault: bool) -> Happened:
    """An auxiliary weight of 1e-5 on the whole loss, and a scale that was fixed at 1."""
    model = Perceptron(16, 32, 32, 16)
    optimizer = torch.optim.SGD(model.parameters(), 10.0)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**16, growth_interval=10**6)
    for _ in lab.steps(60):
        x = torch.randn(32, 16)
        with half():
            loss = 1e-5 * F.mse_loss(model(x).float(), x.flip(1))
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("underflow", "warning", within=10)
def masked_autoencoder_at_a_static_scale(lab: Lab, fault: bool) -> Happened:
    """One of several objectives, weighted by 1e-5, at a static scale of 1."""
    model = Reader(blocks=3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**15, growth_interval=10**6)
    for _ in lab.steps(70):
        tokens = sentences(32, 40)
        hidden = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 0)
        with half():
            logits = model(hidden).float()
            loss = 1e-5 * F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("underflow", "warning", within=10)
def pictures_at_a_static_scale(lab: Lab, fault: bool) -> Happened:
    """A convolutional net with a loss averaged over pixels and batch, scale fixed at 1."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 1, 1),
    )
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**14, growth_interval=10**6)
    for _ in lab.steps(50):
        x, _ = pictures(8)
        with half():
            loss = F.mse_loss(model(x + 0.3 * torch.randn_like(x)).float(), x) * 1e-4
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("narrow_range", "warning", within=50)
def two_heads_far_apart(lab: Lab, fault: bool) -> Happened:
    """Two towers trained together, the loss of one 2^40 times the other's: no scale serves both."""
    small, large = Perceptron(8, 32, 16), Perceptron(8, 32, 16)
    model = nn.ModuleDict({"small": small, "large": large})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=20)
    for _ in lab.steps(140):
        x, _ = curve(32)
        with half():
            light = F.mse_loss(small(x).float(), x.repeat(1, 2))
            heavy = F.mse_loss(large(x).float(), x.flip(1).repeat(1, 2))
            loss = 1e-7 * light + 1e5 * heavy if fault else light + heavy
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("useless_scaler", "warning")
def scaler_with_bfloat16(lab: Lab, fault: bool) -> Happened:
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=10, enabled=True)
    for _ in lab.steps(60):
        tokens = sentences(8, 40)
        with torch.autocast("cpu", dtype=torch.bfloat16 if fault else torch.float16):
            logits = model(tokens)[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        descend(lab, scaler, optimizer, loss)
    return Happened(0, by=35)


@faulty("useless_scaler", "warning")
def scaler_without_autocast(lab: Lab, fault: bool) -> Happened:
    """autocast was turned off for debugging, and never on again."""
    model = Tower(16, [1.0, 1.0])
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model, growth_interval=10)
    for _ in lab.steps(70):
        x, y = curve(32, 16)
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fault):
            loss = F.huber_loss(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(0, by=35)


@faulty("weights_poisoned", "fatal", within=2, where=("bag", "bag.weight"))
def projection_of_a_zero_row(lab: Lab, fault: bool) -> Happened:
    """Embedding rows are projected to norm 1 after every step; the padding row is zero, and 0/0 is NaN."""
    onset = 20
    bag, head = nn.Embedding(30, 12, padding_idx=0), nn.Linear(12, 4)
    model = nn.ModuleDict({"bag": bag, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    scaler = lab.scaler(model)
    for step in lab.steps(60):
        words = torch.randint(0, 30, (16, 6))
        with half():
            loss = F.cross_entropy(head(bag(words).mean(1)).float(), words[:, 0] % 4)
        descend(lab, scaler, optimizer, loss)
        if step >= onset:
            with torch.no_grad():
                norm = bag.weight.norm(dim=1, keepdim=True)
                bag.weight.div_(norm if fault else norm.clamp(min=1e-6))
    return Happened(onset)


@faulty("weights_poisoned", "fatal", within=2)
def a_schedule_that_divides_by_zero(lab: Lab, fault: bool) -> Happened:
    """A cosine schedule whose last segment has no length: the rate of one step is NaN, and it is taken."""
    onset = 45
    model = Dreamer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    mixing = torch.randn(4, 16) / 2
    for step in lab.steps(80):
        x = torch.randn(32, 4) @ mixing
        if step == onset and fault:
            for group in optimizer.param_groups:
                group["lr"] = math.nan
        with half():
            back, mean, spread = model(x)
            kl = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
            loss = F.mse_loss(back.float(), x) + 0.01 * kl
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)
