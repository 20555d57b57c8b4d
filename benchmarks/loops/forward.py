"""Faults that arise in the forward pass: no scale can mend them."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lab import Happened, Lab, faulty, half
from .models import (
    Dreamer,
    Glyphs,
    Heads,
    Perceptron,
    Reader,
    Tagger,
    Tastes,
    Tower,
    curve,
    pictures,
    sentences,
)


def descend(lab: Lab, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """One ordinary attempt."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return lab.note(loss)


class Forecaster(nn.Module):
    """Encoder and decoder over sensor readings; the decoder attends to the encoder."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, width), nn.Linear(3, width)
        self.cross, self.out = Heads(width), nn.Linear(width, 3)

    def forward(self, past: Tensor, now: Tensor) -> Tensor:
        queries = self.decoder(now)
        return self.out(queries + self.cross(queries, self.encoder(past)))


@faulty("forward_overflow", "fatal", within=6, where=("cross",))
def sensors_in_raw_units(lab: Lab, fault: bool) -> Happened:
    """From some step on the loader hands over millivolts instead of volts: attention scores pass 65504."""
    onset = 31 + lab.seed % 7
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        past = torch.randn(16, 10, 3).cumsum(1) * 0.3
        unit = 1000.0 if fault and step >= onset else 1.0
        with half():
            out = model(past * unit, past[:, -4:] * unit)
            loss = F.smooth_l1_loss(out.float(), past[:, -4:])
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("forward_overflow", "fatal", within=6, where=("blocks.6", "blocks.7", "blocks.8", "blocks.9"))
def tower_of_doublings(lab: Lab, fault: bool) -> Happened:
    """Twelve residual blocks that each quadruple the stream, before the only normalisation."""
    model = Tower(16, [4.0 if fault else 1.0] * 12)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        x, y = curve(32, 16)
        with half():
            loss = F.mse_loss(model(x * 4).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


class Gate(nn.Module):
    """Squeeze and excitation by a sum over the picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        energy = x.square().sum((2, 3))
        return x * self.down(energy / energy.amax(1, keepdim=True).clamp(min=1)).sigmoid()[:, :, None, None]


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(1, 8, 3, padding=1), Gate(8)
        self.deep, self.head = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.gate(F.relu(self.stem(x)))).mean((2, 3)))


@faulty("forward_overflow", "fatal", within=6, where=("gate",))
def energy_of_bright_pictures(lab: Lab, fault: bool) -> Happened:
    """A camera with 8-bit values comes in; the energy of a channel is summed in float16."""
    onset = 44 + lab.seed % 5
    model = Excited()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)
    scaler = lab.scaler(model)
    for step in lab.steps(75):
        x, y = pictures(16)
        with half():
            logits = model(x * 255 if fault and step >= onset else x)
            loss = F.cross_entropy(logits.float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


class Spread(nn.Module):
    """Mean and inverse variance of a measurement; the variance is the exponential of a float16 output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.mean, self.precision = Perceptron(8, 24, 24), nn.Linear(24, 1), Precision(24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.trunk(x))
        return self.mean(hidden), self.precision(hidden)


class Precision(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.log = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.log(x).exp()


@faulty("forward_overflow", "fatal", within=6, where=("precision",))
def certainty_beyond_range(lab: Lab, fault: bool) -> Happened:
    """Gaussian likelihood of noiseless data: the model grows certain until exp() leaves float16."""
    onset = 40
    model = Spread()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(70):
        x, y = curve(32)
        with half():
            mean, precision = model(x * (150 if fault and step >= onset else 1))
            loss = (precision.float() * (mean.float() - y).square() - precision.float().log()).mean()
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("loss_in_fp16", "fatal", within=6)
def focal_loss_of_sure_answers(lab: Lab, fault: bool) -> Happened:
    """Focal loss on float16 probabilities: once sigmoid rounds to 1, log(1 - p) is minus infinity."""
    onset = 35 + lab.seed % 4
    model = Perceptron(8, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(70):
        x, _ = curve(48)
        y = (x[:, :1] + 0.5 * x[:, 1:2] > 0).float()
        if step >= onset:  # outliers, on the wrong side
            x[:4], y[:4] = x[:4].sign() * 40, (x[:4, :1].sign() < 0).float()
        with half():
            z = model(x)
        p = (z if fault else z.float()).sigmoid()
        if not fault:
            p = p.clamp(1e-6, 1 - 1e-6)
        loss = -(y * (1 - p) ** 2 * p.log() + (1 - y) * p**2 * (1 - p).log()).float().mean()
        descend(lab, scaler, optimizer, loss)
    bad = next((i for i, value in enumerate(lab.losses) if not math.isfinite(value)), None)
    return Happened(bad)


@faulty("loss_in_fp16", "fatal", within=6)
def squares_summed_in_half(lab: Lab, fault: bool) -> Happened:
    """The squared error of house prices is summed in float16, so that the scaled loss is inf from the start."""
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        x, y = curve(64)
        with half():
            error = model(x) - (200 * y).half()
            loss = error.square().sum() if fault else error.float().square().mean()
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("loss_in_fp16", "fatal", within=6)
def contrast_without_logsumexp(lab: Lab, fault: bool) -> Happened:
    """InfoNCE with the exponentials summed in float16 and a temperature that falls by plan."""
    left, right = Perceptron(8, 24, 16), Perceptron(8, 24, 16)
    model = nn.ModuleDict({"left": left, "right": right})
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        x = torch.randn(24, 8)
        with half():
            a = F.normalize(left(x + 0.1 * torch.randn_like(x)).float(), dim=1)
            b = F.normalize(right(x + 0.1 * torch.randn_like(x)).float(), dim=1)
            similar = (a @ b.T) / max(0.05, 0.5 - 0.01 * step)
            if fault:
                loss = (similar.exp().sum(1).float().log() - similar.diagonal().float()).mean()
            else:
                loss = F.cross_entropy(similar.float(), torch.arange(24))
        descend(lab, scaler, optimizer, loss)
    bad = next((i for i, value in enumerate(lab.losses) if not math.isfinite(value)), None)
    return Happened(bad)


@faulty("mask_constant", "fatal", within=6, where=("mix.0", "mix.1"))
def empty_reviews(lab: Lab, fault: bool) -> Happened:
    """Minus infinity in padded places; a batch with an empty review makes whole rows of it."""
    onset = 26 + lab.seed % 6
    model = Reader(fill=-math.inf if fault else -1e4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(60):
        tokens = sentences(8)
        lengths = torch.randint(4, 13, (8,))
        if step >= onset:
            lengths[:2] = 0
        mask = torch.arange(12)[None] < lengths[:, None]
        with half():
            logits = model(tokens, mask[:, None].expand(8, 12, 12))
            loss = F.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            weight = mask[:, 1:].float().flatten()
            loss = (loss * weight).sum() / weight.sum()
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


class Scored(nn.Module):
    """Attention pooling with the mask added as (1 - mask) · constant."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.words, self.score, self.out = nn.Embedding(40, 16), nn.Linear(16, 1), nn.Linear(16, 3)
        self.constant = constant

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens)
        scores = self.score(x).squeeze(-1)
        scores = scores + (~mask).to(scores.dtype) * torch.tensor(self.constant).to(scores.dtype)
        return self.out((scores.softmax(1)[..., None] * x).sum(1))


@faulty("mask_constant", "fatal", within=6, where=("",))
def minus_1e9_times_zero(lab: Lab, fault: bool) -> Happened:
    """-1e9 becomes minus infinity in float16, and 0 · inf is NaN in every place that is not masked."""
    model = Scored(-1e9 if fault else -1e4)
    optimizer = torch.optim.NAdam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        tokens = torch.randint(40, (16, 10))
        mask = torch.arange(10)[None] < torch.randint(3, 11, (16, 1))
        with half():
            loss = F.cross_entropy(model(tokens, mask).float(), tokens[:, 0] % 3)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("nonfinite_forward", "fatal", within=2, accept=("forward_overflow",))
def nobody_told_of_the_model(lab: Lab, fault: bool) -> Happened:
    """An overflow in the forward pass of a model that the scaler was not given, so nobody can look inside."""
    onset = 20 + lab.seed % 5
    model = Forecaster()
    optimizer = torch.optim.Adamax(model.parameters(), 2e-3)
    scaler = lab.scaler(model, named=False)
    for step in lab.steps(30):
        past = torch.randn(16, 10, 3) * (3000.0 if fault and step >= onset else 1.0)
        with half():
            loss = F.l1_loss(model(past, past[:, -4:]).float(), past[:, -4:])
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("nonfinite_forward", "fatal", within=2, accept=("forward_overflow",))
def functional_recurrence(lab: Lab, fault: bool) -> Happened:
    """A tagger unnamed to the scaler whose logits are sharpened by a float16 exponential from the start."""
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, named=False)
    for _ in lab.steps(25):
        tokens = sentences(8)
        with half():
            logits = model(tokens)
            loss = F.cross_entropy(
                ((logits + 13).exp() if fault else logits).float().flatten(0, 1), (tokens % 4).flatten()
            )
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty(
    "buffers_poisoned", "fatal", within=2, where=("norm1", "stem", "norm1.running_mean", "norm1.running_var")
)
def one_broken_picture(lab: Lab, fault: bool) -> Happened:
    """One picture with an infinite pixel: its step is skipped, but BatchNorm has taken it into its averages."""
    onset = 33 + lab.seed % 9
    model = Glyphs()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        x, y = pictures(16)
        if fault and step == onset:
            x[3, 0, 5, 5] = math.inf
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("bad_batch", "warning", within=1)
def a_rating_that_is_not_a_number(lab: Lab, fault: bool) -> Happened:
    """A missing rating was read as NaN, once."""
    onset = 48 + lab.seed % 11
    model = Tastes()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    scaler = lab.scaler(model)
    for step in lab.steps(90):
        user, item = torch.randint(50, (64,)), torch.randint(60, (64,))
        rating = ((user + item) % 5).float() / 4
        if fault and step == onset:
            rating[5] = math.nan
        with half():
            loss = F.mse_loss(model(user, item).float(), rating)
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("bad_batch", "warning", within=1)
def same_place_in_every_epoch(lab: Lab, fault: bool) -> Happened:
    """Twenty fixed batches, one with a corrupt file, in the same order each epoch; group norm keeps no averages."""
    broken = 7 + lab.seed % 10
    model = Glyphs(batch_norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    batches = [pictures(16) for _ in range(20)]
    if fault:
        batches[broken][0][2] = math.nan
    for step in lab.steps(100):
        x, y = batches[step % 20]
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        lab.log(epoch=step // 20, batch_id=step % 20)
        descend(lab, scaler, optimizer, loss)
    return Happened(broken)


@faulty("bad_batch", "warning", within=1)
def division_by_an_empty_basket(lab: Lab, fault: bool) -> Happened:
    """Shuffled shopping baskets of which one has no goods: its mean is 0/0 whenever it comes up."""
    bag, head = nn.Embedding(30, 12), nn.Linear(12, 4)
    model = nn.ModuleDict({"bag": bag, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    scaler = lab.scaler(model)
    goods = torch.randint(30, (15, 8, 6))
    counts = torch.randint(1, 7, (15, 8))
    if fault:
        counts[4, 2] = 0
    first = None
    for epoch in range(5):
        for place, batch in enumerate(torch.randperm(15).tolist()):
            step = epoch * 15 + place
            if lab.limit is not None and step >= lab.limit:
                break
            if batch == 4 and first is None:
                first = step
            there = (torch.arange(6)[None] < counts[batch][:, None]).float()
            with half():
                mean = (bag(goods[batch]) * there[..., None]).sum(1) / there.sum(1, keepdim=True)
                loss = F.cross_entropy(head(mean).float(), goods[batch][:, 0] % 4)
            lab.log(batch_id=batch, epoch=epoch)
            descend(lab, scaler, optimizer, loss)
    return Happened(first)


@faulty("spike", "info", accept=("growth_probe",))
def one_wild_target(lab: Lab, fault: bool) -> Happened:
    """A single batch with targets of 300: loss and norm leap and come back on the next step."""
    onset = 60 + lab.seed % 5
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model, init_scale=2.0**12)
    for step in lab.steps(110):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(model(x).float(), y * (300 if fault and step == onset else 1))
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("spike", "info", accept=("growth_probe",))
def vae_meets_a_stranger(lab: Lab, fault: bool) -> Happened:
    """A lone batch of another kind: a skip with a finite loss below the ceiling, and nothing after it."""
    onset = 70
    model = Dreamer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    mixing = torch.randn(4, 16)
    for step in lab.steps(120):
        x = torch.randn(32, 4) @ mixing / 2 * (40 if fault and step == onset else 1)
        with half():
            back, mean, spread = model(x)
            kl = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
            loss = F.mse_loss(back.float(), x) + 0.01 * kl
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)
