"""Architectures and data of the third set; none is wider than 48."""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Lab, half


def advance(lab: Lab, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> bool:
    """One attempt in the usual order; whether the step was taken."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    lab.note(loss)
    return scaler.get_scale() >= before


def first_nonfinite(lab: Lab) -> int | None:
    return next((i for i, x in enumerate(lab.losses) if not math.isfinite(x)), None)


def stack(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), act()]
    return nn.Sequential(*layers[:-1])


class Hopfield(nn.Module):
    """Recall of stored patterns by a softmax of similarities at an inverse temperature `beta`."""

    def __init__(self, width: int, patterns: int) -> None:
        super().__init__()
        self.stored = nn.Parameter(torch.randn(patterns, width))
        self.norm, self.beta = nn.LayerNorm(width), 1.0

    def forward(self, x: Tensor) -> Tensor:
        similar = (self.beta * self.norm(x)) @ self.stored.T
        out: Tensor = similar.softmax(-1) @ self.stored
        return out


class SumOfNeighbours(nn.Module):
    """A layer of a graph network: what the neighbours hold is added up, normalised and mixed."""

    def __init__(self, enter: int, leave: int, *, mean: bool) -> None:
        super().__init__()
        self.norm, self.mix, self.mean = nn.LayerNorm(enter), nn.Linear(enter, leave), mean

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        if self.mean:
            edges = edges / edges.sum(1, keepdim=True)
        return F.relu(self.mix(self.norm(edges @ nodes)))


def payments(count: int, hub: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Accounts with four amounts in euro each, who paid whom, and whether most of what is around is of the first sort."""
    nodes = 800 * torch.rand(count, 4)
    edges = (torch.rand(count, count) < 4 / count).float() + torch.eye(count)
    if hub:
        edges[0] = 1
    around = edges @ nodes
    return nodes, edges, (around[:, 0] > around[:, 1]).long()


class Outliner(nn.Module):
    """A segmenter of two convolutions for pictures of any side."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.leave(F.silu(self.enter(x)))
        return out[:, 0]


def discs(batch: int, side: int, radius: float = 0.9) -> tuple[Tensor, Tensor]:
    """Noisy pictures of a disc and the disc itself."""
    line = torch.linspace(-1, 1, side)
    inside = (line[:, None].square() + line.square() < radius**2).float().expand(batch, -1, -1)
    return (inside + 0.3 * torch.randn(batch, side, side))[:, None], inside


class SelfAttention(nn.Module):
    """Attention of one head; `bias` is added to the scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.read(x).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(x.shape[-1]) + bias.to(query.dtype)
        out: Tensor = self.write(scores.softmax(-1) @ value)
        return out


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), SelfAttention(width)
        self.second, self.feed = nn.LayerNorm(width), stack(width, 2 * width, width, act=nn.GELU)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.first(x), bias)
        out: Tensor = x + self.feed(self.second(x))
        return out


class Decoder(nn.Module):
    """A language model of two layers over 40 words, of which 0 is padding; its head may be tied."""

    def __init__(self, width: int = 32, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            bias = torch.full((words.shape[1], words.shape[1]), -1e4).triu(1)
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, bias)
        out: Tensor = self.head(self.norm(x))
        return out


def counting(batch: int, length: int = 12) -> Tensor:
    """Sentences of words that count upwards by a stride of their own."""
    start, stride = torch.randint(1, 40, (batch, 1)), torch.randint(1, 4, (batch, 1))
    return (start + stride * torch.arange(length)) % 39 + 1


class Listener(nn.Module):
    """Convolutions over a waveform of any length, averaged, for four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.ears = nn.Sequential(
            nn.Conv1d(1, 12, 9, stride=4), nn.GELU(), nn.Conv1d(12, 24, 5, stride=2), nn.GELU()
        )
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.ears(x[:, None]).mean(-1))
        return out


def tones(batch: int, length: int = 160) -> tuple[Tensor, Tensor]:
    kind = torch.randint(4, (batch,))
    phase = 2 * math.pi * torch.rand(batch, 1)
    pitch = 0.1 * (1 + kind[:, None].float())
    return torch.sin(pitch * torch.arange(length) + phase) + 0.2 * torch.randn(batch, length), kind


class Codebook(nn.Module):
    """Vector quantisation by codes that are moving averages of what was assigned to them."""

    codes: Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(count, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        nearest = (x[:, None] - self.codes).square().sum(2).argmin(1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            for code in nearest.unique():
                self.codes[code].lerp_(x[nearest == code].mean(0), 0.05)
        return x + (chosen - x).detach(), F.mse_loss(x, chosen.detach())


class Mixture(nn.Module):
    """Four experts that share by a softmax."""

    def __init__(self, enter: int, leave: int) -> None:
        super().__init__()
        self.gate = nn.Linear(enter, 4)
        self.experts = nn.ModuleList(stack(enter, 24, leave, act=nn.ReLU) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share: Tensor = self.gate(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1) @ share[..., None]


class Adapted(nn.Module):
    """A frozen layer and its low-rank adapter."""

    def __init__(self, enter: int, leave: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(enter, leave).requires_grad_(False)
        self.down = nn.Linear(enter, rank, bias=False)
        self.up = nn.Linear(rank, leave, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Bandit(nn.Module):
    """An actor over five arms and a critic, from eight numbers of context."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = stack(8, 32, 5), stack(8, 32, 1)

    def play(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Contexts, the arms pulled and what they paid."""
        seen = torch.randn(batch, 8)
        with torch.no_grad():
            arm = torch.distributions.Categorical(logits=self.actor(seen)).sample()
        return seen, arm, seen.gather(1, arm[:, None])[:, 0] + 0.1 * torch.randn(batch)


def spring(batch: int, width: int = 12) -> tuple[Tensor, Tensor]:
    """Masses on springs at one moment and the next."""
    now = torch.randn(batch, width) * torch.linspace(0.5, 2.0, width)
    return now, 0.9 * now.roll(1, 1) - 0.2 * now


def clicks(batch: int) -> tuple[Tensor, Tensor]:
    """Ten numbers of a visitor and whether there was a click."""
    x = torch.randn(batch, 10)
    return x, (x[:, 0] * x[:, 1] + 0.5 * x[:, 2] > 0).float()


class Recurrence(nn.Module):
    """A linear recurrence whose states grow by `growth` a step, read by a normalised head."""

    def __init__(self, width: int, growth: float) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(1, width), nn.Linear(width, width, bias=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)
        nn.init.orthogonal_(self.again.weight, growth)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], self.again.in_features)
        for now in x[..., None].unbind(1):
            state = self.again(state) + self.enter(now)
        out: Tensor = self.head(self.norm(state))
        return out


class Shelf(nn.Module):
    """Readers and books as rows of embeddings with sparse gradients, and a score for each pair."""

    def __init__(self, readers: int = 200, books: int = 300, width: int = 16) -> None:
        super().__init__()
        self.readers = nn.Embedding(readers, width, sparse=True)
        self.books = nn.Embedding(books, width, sparse=True)
        self.score = stack(2 * width, 24, 1)

    def loans(self, batch: int) -> tuple[Tensor, Tensor]:
        reader = torch.randint(self.readers.num_embeddings, (batch,))
        book = torch.randint(self.books.num_embeddings, (batch,))
        both = torch.cat([self.readers(reader), self.books(book)], 1)
        out: Tensor = self.score(both)
        return out[:, 0], (book % 3 == 0).float()


class Forge(nn.Module):
    """A generator of two-dimensional points on two moons, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = stack(6, 32, 2), stack(2, 32, 1)

    def judged(self, batch: int = 48) -> Tensor:
        angle = math.pi * torch.rand(batch)
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch, 2)
        with half():
            fake = self.maker(torch.randn(batch, 6)).detach()
            of_fake, of_real = self.critic(fake), self.critic(real)
        return F.softplus(of_fake.float()).mean() + F.softplus(-of_real.float()).mean()

    def forged(self, batch: int = 48) -> Tensor:
        with half():
            score = self.critic(self.maker(torch.randn(batch, 6)))
        return F.softplus(-score.float()).mean()
