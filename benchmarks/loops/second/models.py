"""Architectures and data of the second set; none is wider than 48."""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SkipNet(nn.Module):
    """A U-Net of two levels over 16 × 16 pictures."""

    def __init__(self, width: int = 8, batch_norm: bool = False) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(2, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = F.silu(self.norm(self.enter(x)))
        low = F.silu(self.bottom(F.silu(self.down(kept))))
        return self.leave(torch.cat([kept, self.up(low)], 1))


class Attend(nn.Module):
    """Attention of one head; `fill` is added to the scores of what is hidden."""

    def __init__(self, width: int, fill: float = -1e4) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.fill = nn.Linear(width, width), fill

    def forward(self, x: Tensor, memory: Tensor, hidden: list[Tensor] | None = None) -> Tensor:
        key, value = self.pair(memory).chunk(2, -1)
        scores = self.query(x) @ key.transpose(-1, -2) / math.sqrt(x.shape[-1])
        for part in hidden or []:
            scores = scores + part.to(scores.dtype) * self.fill
        return self.out(scores.softmax(-1) @ value)


class PatchBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.attend = nn.LayerNorm(width), Attend(width)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.before(x)
        x = x + self.attend(normal, normal)
        return x + self.mlp(self.between(x))


class Patches(nn.Module):
    """A vision transformer: 16 patches of 4 × 4, a class token, two blocks."""

    def __init__(self, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(PatchBlock(width), PatchBlock(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.cut(x).flatten(2).transpose(1, 2)
        seen = torch.cat([self.token.to(seen.dtype).expand(len(seen), -1, -1), seen], 1) + self.place
        return self.head(self.blocks(seen)[:, 0])


class Writer(nn.Module):
    """A decoder over bytes, with masks for the future and for padding."""

    def __init__(self, width: int = 24, words: int = 30, fill: float = -1e4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.before, self.attend = nn.LayerNorm(width), Attend(width, fill)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, padded: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        future = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1)
        hidden = [future] if padded is None else [future, padded[:, None].float()]
        normal = self.before(x)
        x = x + self.attend(normal, normal, hidden)
        return self.head(x + self.mlp(x))


class Gru(nn.Module):
    """A tagger that reads in both directions."""

    def __init__(self, words: int = 40, width: int = 16, tags: int = 5, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=padding)
        self.read = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(2 * width, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tag(self.read(self.embed(tokens))[0])


class Dilated(nn.Module):
    """Causal convolutions that foretell the next four values of a series."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 3, padding=1)
        self.deep = nn.ModuleList(nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in (2, 4))
        self.leave = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x[:, None])
        for layer in self.deep:
            x = x + F.gelu(layer(x))
        return self.leave(x[..., -1])


class Ledger(nn.Module):
    """Two categories and six numbers of a table."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.shop, self.day = nn.Embedding(20, 6), nn.Embedding(7, 4)
        self.first, self.norm = nn.Linear(16, width), nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)

    def forward(self, shop: Tensor, day: Tensor, numbers: Tensor) -> Tensor:
        x = torch.cat([self.shop(shop), self.day(day), numbers], 1)
        return self.last(F.relu(self.norm(self.first(x))))


class Noise(nn.Module):
    """Foretells the noise in a point of the plane at a given time of a diffusion."""

    def __init__(self, width: int = 48, size: int = 2) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU())
        self.enter, self.middle = nn.Linear(size, width), nn.Linear(width, width)
        self.leave = nn.Linear(width, size)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * 2.0 ** torch.arange(4)
        h = self.enter(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))
        return self.leave(F.silu(h + self.middle(F.silu(h))))


class Elbo(nn.Module):
    def __init__(self, size: int = 64, latent: int = 4) -> None:
        super().__init__()
        self.read = nn.Sequential(nn.Linear(size, 32), nn.ELU(), nn.Linear(32, 2 * latent))
        self.draw = nn.Sequential(nn.Linear(latent, 32), nn.ELU(), nn.Linear(32, size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.read(x).float().chunk(2, 1)
        return self.draw(mean + (spread / 2).exp() * torch.randn_like(mean)), mean, spread


class Experts(nn.Module):
    """Four experts of which each token is sent to its best one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        chance, chosen = self.gate(x).float().softmax(-1).max(-1)
        out = torch.zeros(x.shape)
        for i, expert in enumerate(self.experts):
            out[chosen == i] = expert(x[chosen == i]).float()
        return out * chance[..., None]


class Gated(nn.Module):
    """The feed-forward layer of many language models: silu(gate) · up, then down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LowRank(nn.Module):
    """A frozen linear layer and what is added to it."""

    def __init__(self, size: int, rank: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.frozen = nn.Linear(size, size).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, size, dtype=dtype) / math.sqrt(size))
        self.b = nn.Parameter(torch.zeros(size, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + F.linear(F.linear(x, self.a), self.b)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b), nn.SiLU()] if i < len(widths) - 2 else [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def bars(batch: int) -> tuple[Tensor, Tensor]:
    """Pictures of one bright bar, and in which quarter it stands. [batch, 1, 16, 16], [batch]"""
    quarter = torch.randint(4, (batch,))
    x = 0.1 * torch.rand(batch, 1, 16, 16)
    for i, q in enumerate(quarter.tolist()):
        x[i, 0, :, 4 * q : 4 * q + 2] += 0.8
    return x, quarter


def waves(batch: int, length: int = 24) -> tuple[Tensor, Tensor]:
    """A sum of two sines: what was and the next four values. [batch, length], [batch, 4]"""
    t = torch.arange(length + 4.0)
    phase, pace = 6.3 * torch.rand(batch, 1), 0.2 + 0.2 * torch.rand(batch, 1)
    series = (pace * t + phase).sin() + 0.3 * (3 * pace * t).cos()
    return series[:, :-4], series[:, -4:]


def words(batch: int, length: int = 10, low: int = 1, high: int = 30) -> Tensor:
    """Sequences that count upwards in steps of one to three. [batch, length]"""
    start, pace = torch.randint(high, (batch, 1)), torch.randint(1, 4, (batch, 1))
    return low + (start + pace * torch.arange(length)) % (high - low)


def sales(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of a table and what they earn. [count], [count], [count, 6], [count, 1]"""
    shop, day, numbers = torch.randint(20, (count,)), torch.randint(7, (count,)), torch.randn(count, 6)
    earned = 0.1 * shop.float() + (day == 6).float() + numbers[:, 0] - 0.5 * numbers[:, 1].abs()
    return shop, day, numbers, earned[:, None]


def ring(batch: int) -> Tensor:
    angle = 6.3 * torch.rand(batch, 1)
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch, 2)
