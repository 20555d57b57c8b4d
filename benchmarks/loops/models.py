"""Small models of many kinds; none is wider than 32."""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Perceptron(nn.Sequential):
    def __init__(self, *widths: int, act: type[nn.Module] = nn.GELU) -> None:
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), act()]
        super().__init__(*layers[:-1])


class Glyphs(nn.Module):
    """A convolutional classifier of 12 × 12 pictures."""

    def __init__(self, classes: int = 5, width: int = 8, batch_norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm1: nn.Module = nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(2, width)
        self.deep = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2: nn.Module = nn.BatchNorm2d(2 * width) if batch_norm else nn.GroupNorm(2, 2 * width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.deep(x)))
        return self.head(x.mean((2, 3)))


class Heads(nn.Module):
    """Attention written out; `fill` stands where the mask is False, `sharp` multiplies the scores."""

    def __init__(self, width: int, heads: int = 2, fill: float = -1e4) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.heads, self.fill = heads, fill

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
        scores = q @ k.transpose(-1, -2)
        scores = scores / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], self.fill)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """A transformer over tokens, causal by a buffer of minus infinities if asked."""

    causal: Tensor

    def __init__(
        self, words: int = 40, width: int = 16, blocks: int = 2, length: int = 12, fill: float = -1e4
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)
        self.mix = nn.ModuleList(Heads(width, fill=fill) for _ in range(blocks))
        self.think = nn.ModuleList(Perceptron(width, 2 * width, width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for i, (mix, think) in enumerate(zip(self.mix, self.think, strict=True)):
            x = x + mix(self.norms[2 * i](x), mask=mask)
            x = x + think(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


class Causal(nn.Module):
    """Next-token model whose mask is a buffer full of minus infinities."""

    below: Tensor

    def __init__(self, words: int = 30, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, words)
        self.register_buffer("below", torch.full((length, length), -math.inf).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + self.below
        return self.head(x + self.out(scores.softmax(-1) @ v))


class Tagger(nn.Module):
    """A recurrent tagger, its GRU written out."""

    def __init__(self, words: int = 30, width: int = 16, tags: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.gates, self.candidate = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)
        self.tags = nn.Linear(width, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            reset, keep = self.gates(torch.cat([x[:, t], state], 1)).sigmoid().chunk(2, 1)
            new = self.candidate(torch.cat([x[:, t], reset * state], 1)).tanh()
            state = keep * state + (1 - keep) * new
            out.append(state)
        return self.tags(torch.stack(out, 1))


class Tastes(nn.Module):
    """A recommender: users times items, plus what each is liked in general."""

    def __init__(self, users: int = 50, items: int = 60, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.deep = Perceptron(2 * width, 24, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.users(user), self.items(item)
        return (u * i).sum(1) + self.deep(torch.cat([u, i], 1)).squeeze(1)


class Dreamer(nn.Module):
    """A variational autoencoder."""

    def __init__(self, width: int = 16, latent: int = 4) -> None:
        super().__init__()
        self.encode = Perceptron(width, 24, 2 * latent)
        self.decode = Perceptron(latent, 24, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).float().chunk(2, 1)
        spread = spread.clamp(-8, 4)
        return self.decode(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


class Residual(nn.Module):
    """x + gain · f(x), with nothing that keeps it in range."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.body, self.gain = Perceptron(width, width, width), gain

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x + self.body(x)


class Tower(nn.Module):
    def __init__(self, width: int, gains: list[float], out: int = 1) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Residual(width, gain) for gain in gains)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(self.norm(x))


def pictures(count: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Bars at as many angles as there are classes, in noise."""
    labels = torch.randint(classes, (count,))
    axis = torch.linspace(-1, 1, 12)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle = (labels * math.pi / classes)[:, None, None]
    bars = (-8 * (x * angle.cos() + y * angle.sin()).square()).exp()
    return (bars + 0.3 * torch.randn(count, 12, 12))[:, None], labels


def sentences(count: int, words: int = 30, length: int = 12) -> Tensor:
    """Sequences in which each token is the one before plus one of three steps."""
    jumps = torch.tensor([1, 3, 7])[torch.randint(3, (count, 1))]
    return (torch.randint(words, (count, 1)) + jumps * torch.arange(length)) % words


def curve(count: int, width: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, width)
    return x, (x[:, :1] * x[:, 1:2]).tanh() + 0.5 * x[:, 2:3] + 0.05 * torch.randn(count, 1)
