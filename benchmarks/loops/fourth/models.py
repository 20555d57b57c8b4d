"""Architectures and data of the fourth set; none is wider than 48."""

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Lab


def turn(
    lab: Lab,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    clip: float | None = None,
) -> bool:
    """One attempt as the manual has it; whether the step was taken."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(held(optimizer), clip)
    lab.note(loss)
    return settle(scaler, optimizer)


def settle(scaler: torch.amp.GradScaler, *optimizers: torch.optim.Optimizer) -> bool:
    """Step and update; whether the scale did not fall."""
    before = scaler.get_scale()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def broken_at(lab: Lab) -> int | None:
    """The first loss that is not finite."""
    return next((i for i, x in enumerate(lab.losses) if not math.isfinite(x)), None)


def dense(*widths: int, act: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    layers = [layer for enter, leave in pairs for layer in (nn.Linear(enter, leave), act())]
    return nn.Sequential(*layers[:-1])


def weather(batch: int) -> tuple[Tensor, Tensor]:
    """Ten readings of a station and three of the next hour."""
    now = torch.randn(batch, 10)
    then = torch.stack([now[:, 0] * now[:, 1], now[:, 2].sin(), now[:, 3:].mean(1)], 1)
    return now, then + 0.05 * torch.randn_like(then)


def leaves(batch: int, classes: int = 6) -> tuple[Tensor, Tensor]:
    """Outlines of leaves as 16 radii, and their species."""
    kind = torch.randint(classes, (batch,))
    angle = torch.arange(16) * math.tau / 16
    radius = 1 + 0.5 * torch.cos((kind[:, None] + 1) * angle + 0.3 * torch.randn(batch, 1))
    return radius + 0.1 * torch.randn(batch, 16), kind


def melodies(batch: int, length: int = 16) -> Tensor:
    """Notes 1 to 23 that climb by thirds or fall by fourths."""
    start, up = torch.randint(1, 24, (batch, 1)), torch.randint(0, 2, (batch, 1))
    return (start + (4 * up + 19 * (1 - up)) * torch.arange(length)) % 23 + 1


def cells(batch: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Pictures of one round cell, and where it is."""
    line = torch.linspace(-1, 1, side)
    middle = torch.rand(batch, 2, 1, 1) - 0.5
    far = (line[:, None] - middle[:, 0]).square() + (line - middle[:, 1]).square()
    mask = (far < 0.2).float()[:, None]
    return mask + 0.2 * torch.randn(batch, 1, side, side), mask


class Attention(nn.Module):
    """One head; `bias` is added to the scores, `cool` is what they are multiplied by."""

    def __init__(self, width: int, cool: float | None = None) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.cool = width**-0.5 if cool is None else cool

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scores = (self.query(x) @ self.key(x).transpose(1, 2)) * self.cool
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        out: Tensor = self.out(scores.softmax(-1) @ self.value(x))
        return out


class Composer(nn.Module):
    """A transformer of two blocks over 24 notes, of which 0 is silence."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.notes = nn.Embedding(24, width)
        self.place = nn.Parameter(0.1 * torch.randn(64, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.attend = nn.ModuleList(Attention(width) for _ in range(2))
        self.feed = nn.ModuleList(dense(width, 2 * width, width, act=nn.GELU) for _ in range(2))
        self.head = nn.Linear(width, 24)

    def forward(self, notes: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            bias = torch.full((notes.shape[1], notes.shape[1]), -1e4).triu(1)
        x = self.notes(notes) + self.place[: notes.shape[1]]
        for i, (attend, feed) in enumerate(zip(self.attend, self.feed, strict=True)):
            x = x + attend(self.norms[2 * i](x), bias)
            x = x + feed(self.norms[2 * i + 1](x))
        out: Tensor = self.head(self.norms[4](x))
        return out


def sung(model: nn.Module, notes: Tensor) -> Tensor:
    """Cross-entropy of each next note, in float32; silence does not count."""
    guess = model(notes[:, :-1]).float()
    return F.cross_entropy(guess.flatten(0, 1), notes[:, 1:].flatten(), ignore_index=0)


class Humming(nn.Module):
    """A GRU over notes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.notes, self.head = nn.Embedding(24, width), nn.Linear(width, 24)
        self.cell = nn.GRUCell(width, width)

    def forward(self, notes: Tensor) -> Tensor:
        state = torch.zeros(notes.shape[0], self.cell.hidden_size)
        states = []
        for x in self.notes(notes).unbind(1):
            state = self.cell(x, state)
            states.append(state)
        out: Tensor = self.head(torch.stack(states, 1))
        return out


class Segmenter(nn.Module):
    """A U-Net of two levels, with batch norms or none."""

    def __init__(self, width: int = 8, *, norm: bool = True, gain: float = 1.0) -> None:
        super().__init__()
        self.down = self._block(1, width, norm)
        self.middle = self._block(width, 2 * width, norm)
        self.up = self._block(3 * width, width, norm)
        self.last = nn.Conv2d(width, 1, 1)
        if gain != 1:
            for conv in (self.down[0], self.middle[0], self.up[0]):
                nn.init.orthogonal_(conv.weight, gain)

    @staticmethod
    def _block(enter: int, leave: int, norm: bool) -> nn.Sequential:
        conv = nn.Conv2d(enter, leave, 3, padding=1)
        return (
            nn.Sequential(conv, nn.BatchNorm2d(leave), nn.ReLU()) if norm else nn.Sequential(conv, nn.ReLU())
        )

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.middle(F.avg_pool2d(fine, 2))
        both = torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1)
        out: Tensor = self.last(self.up(both))
        return out


class Adapter(nn.Module):
    """A low-rank change of a frozen layer."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.narrow = nn.Linear(base.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.wide(self.narrow(x))
        return out


class Switch(nn.Module):
    """A mixture of experts, each row of the batch through the one that the router likes best."""

    def __init__(self, enter: int, leave: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(enter, experts)
        self.experts = nn.ModuleList(dense(enter, 24, leave, act=nn.ReLU) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        share, best = self.router(x).float().softmax(-1).max(-1)
        parts = torch.zeros(x.shape[0], self.experts[0][-1].out_features)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero()[:, 0]
            if len(rows):
                parts = parts.index_add(0, rows, share[rows, None] * expert(x[rows]).float())
        return parts


class Towers(nn.Module):
    """Two encoders whose outputs meet on the sphere, and the logarithm of an inverse temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.read = dense(10, 32, 16), dense(10, 32, 16)
        self.warmth = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.seen(a).float(), dim=1), F.normalize(self.read(b).float(), dim=1)
        alike = left @ right.T
        return self.warmth.exp().to(alike.dtype) * alike


def views(batch: int) -> tuple[Tensor, Tensor]:
    """Two noisy views of each of many things."""
    thing = torch.randn(batch, 10)
    return thing + 0.1 * torch.randn_like(thing), thing.flip(1) + 0.1 * torch.randn_like(thing)


def paired(scores: Tensor) -> Tensor:
    """Each row's own column is the right one, and the other way round."""
    own = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores.float(), own) + F.cross_entropy(scores.float().T, own)) / 2


class Potters(nn.Module):
    """A maker of rings of points, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = dense(4, 32, 2), dense(2, 32, 1)

    def made(self, batch: int = 32) -> Tensor:
        out: Tensor = self.maker(torch.randn(batch, 4))
        return out


def rings(batch: int = 32) -> Tensor:
    angle = math.tau * torch.rand(batch)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch, 2)


class Denoiser(nn.Module):
    """Predicts the noise in a ring of points, told how much there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(3, 48, 48, 2)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        out: Tensor = self.net(torch.cat([x, level], 1))
        return out


def denoised(model: nn.Module, batch: int = 64) -> Tensor:
    """The diffusion loss at random noise levels."""
    level, noise = torch.rand(batch, 1), torch.randn(batch, 2)
    mixed = (1 - level) * rings(batch) + level * noise
    return F.mse_loss(model(mixed, level).float(), noise)


def average(target: nn.Module, source: nn.Module, keep: float) -> None:
    """An exponential moving average of weights."""
    with torch.no_grad():
        for mean, now in zip(target.parameters(), source.parameters(), strict=True):
            mean.lerp_(now, 1 - keep)


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
