"""Architectures, data and the usual iteration of the sixth set; nothing is wider than 64."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Lab, half


def advance(lab: Lab, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> bool:
    """One iteration as in torch's manual; whether its step was taken."""
    before = scaler.get_scale()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    lab.note(loss)
    return scaler.get_scale() >= before


class Hop(nn.Module):
    """Every node adds up what its neighbours say, by the weights of a dense adjacency."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.say, self.keep = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return F.leaky_relu(self.keep(nodes) + edges @ self.say(nodes))


class GraphNet(nn.Module):
    def __init__(self, features: int = 6, width: int = 24, hops: int = 2) -> None:
        super().__init__()
        self.lift = nn.Linear(features, width)
        self.hops = nn.ModuleList(Hop(width) for _ in range(hops))
        self.readout = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """[graphs, nodes, features], [graphs, nodes, nodes] → [graphs]"""
        seen = self.lift(nodes)
        for hop in self.hops:
            seen = hop(seen, edges)
        return self.readout(seen.mean(1)).squeeze(1)


def graphs(batch: int, nodes: int = 12, features: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric graphs without loops, features of their nodes, and a property of each graph."""
    edges = (torch.rand(batch, nodes, nodes) < 0.35).float().triu(1)
    edges = edges + edges.transpose(1, 2)
    # a ring, so that no node is alone
    ring = torch.eye(nodes).roll(1, 0)
    edges = (edges + ring + ring.T).clamp_max(1)
    x = torch.randn(batch, nodes, features)
    wanted = (edges @ x[..., :1]).squeeze(2).mean(1) / 4 + x[..., 1].abs().mean(1)
    return x, edges, wanted


def averaged(edges: Tensor) -> Tensor:
    """Rows that add up to 1."""
    return edges / edges.sum(-1, keepdim=True)


class Pairs(nn.Module):
    """The second order of a factorization machine: half of (Σ x v)² − Σ x² v²."""

    def __init__(self, fields: int, rank: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(0.1 * torch.randn(fields, rank))

    def forward(self, x: Tensor) -> Tensor:
        together = (x @ self.factors).square()
        alone = x.square() @ self.factors.square()
        return 0.5 * (together - alone).sum(1)


class DeepFm(nn.Module):
    def __init__(self, fields: int = 32, rank: int = 8) -> None:
        super().__init__()
        self.wide, self.pairs = nn.Linear(fields, 1), Pairs(fields, rank)
        self.deep = nn.Sequential(nn.Linear(fields, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x).squeeze(1) + self.pairs(x) + self.deep(x.log1p()).squeeze(1)


def sessions(batch: int, fields: int = 32) -> tuple[Tensor, Tensor]:
    """How often each of the categories was clicked, and whether something was bought."""
    counts = torch.poisson(torch.full((batch, fields), 0.4))
    bought = (counts[:, 0] * counts[:, 1] + counts[:, 2] > 0.5).float()
    return counts, bought


class Chain(nn.Module):
    """A recurrent tagger, from LSTM cells, with the transitions of a conditional random field."""

    def __init__(self, words: int = 30, width: int = 24, tags: int = 4) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(words, width), nn.LSTMCell(width, width)
        self.emit = nn.Linear(width, tags)
        self.moves = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, tokens: Tensor) -> Tensor:
        seen, state, out = self.words(tokens), None, []
        for t in range(tokens.shape[1]):
            state = self.cell(seen[:, t], state)
            out.append(state[0])
        return self.emit(torch.stack(out, 1))


class Pooled(nn.Module):
    """Attention pooling over the instances of a bag; `hide` is added to the scores of what is padding."""

    def __init__(self, width: int, hide: float) -> None:
        super().__init__()
        self.inner, self.score, self.hide = nn.Linear(width, width), nn.Linear(width, 1), hide

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(self.inner(x).tanh()).squeeze(2)
        hidden = (1.0 - mask) * self.hide
        weights = (scores + hidden.to(scores.dtype)).softmax(1)
        return (weights[..., None] * x).sum(1)


class Bags(nn.Module):
    def __init__(self, hide: float, features: int = 10, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.pool = Pooled(width, hide)
        self.verdict = nn.Linear(width, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.verdict(self.pool(self.patch(x), mask)).squeeze(1)


class Clips(nn.Module):
    """A convolutional autoencoder of short spectrograms, 1 × 16 × 16."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
        )
        self.expand = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.squeeze(x))


def spectrograms(batch: int) -> Tensor:
    """One tone that rises or falls, in noise. [batch, 1, 16, 16]"""
    t, f = torch.arange(16.0), torch.arange(16.0)[:, None]
    start, slope = 16 * torch.rand(batch, 1, 1), torch.randn(batch, 1, 1)
    tone = (-((f - start - slope * (t - 8)) ** 2) / 4).exp()
    return (tone + 0.05 * torch.randn(batch, 16, 16))[:, None]


class Letters(nn.Module):
    """A language model of a pre-norm block from torch's own parts; its causal mask is full of minus infinities."""

    ahead: Tensor

    def __init__(self, letters: int = 28, width: int = 24, length: int = 12) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        nn.init.normal_(self.table.weight, std=0.2)
        self.register_buffer("ahead", torch.full((length, length), -math.inf).triu(1))

    def forward(self, text: Tensor) -> Tensor:
        n = text.shape[1]
        x = self.table(text) + self.place.weight[:n]
        return self.out(self.norm(self.block(x, src_mask=self.ahead[:n, :n])))


def text(batch: int, length: int = 12, letters: int = 28) -> Tensor:
    """Letters of which each follows from the two before it, one in ten by chance. [batch, length]"""
    out = [torch.randint(letters, (batch,)), torch.randint(letters, (batch,))]
    for _ in range(length - 2):
        follows = (out[-1] + 3 * (out[-2] % 2) + 1) % letters
        out.append(torch.where(torch.rand(batch) < 0.1, torch.randint(letters, (batch,)), follows))
    return torch.stack(out, 1)


def spelled(model: nn.Module, batch: int = 8, reduction: str = "mean") -> Tensor:
    """The next-letter loss of a fresh batch."""
    read = text(batch)
    with half():
        logits = model(read[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), read[:, 1:].flatten(), reduction=reduction)


def dense(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers.append(nn.Linear(widths[i], widths[i + 1]))
        if i < len(widths) - 2:
            layers.append(nn.LeakyReLU(0.2))
    return nn.Sequential(*layers)


class Forgers(nn.Module):
    """A generator of points on two moons, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.forge, self.judge = dense(6, 48, 48, 2), dense(2, 48, 48, 1)


def moons(batch: int) -> Tensor:
    angle, upper = math.pi * torch.rand(batch), (torch.rand(batch) < 0.5).float()
    x = torch.stack([angle.cos() + 1 - upper, (2 * upper - 1) * angle.sin() + 0.5 * (1 - upper)], 1)
    return x + 0.05 * torch.randn(batch, 2)


class Faces(nn.Module):
    """A small convolutional embedder, 1 × 16 × 16 to a direction in 16 dimensions."""

    def __init__(self, width: int = 8, out: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.GroupNorm(2, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.project = nn.Linear(32 * width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.features(x).flatten(1))


def portraits(labels: Tensor, noise: float = 0.3) -> Tensor:
    """A pattern for each label, in noise. [batch] → [batch, 1, 16, 16]"""
    k = labels.float()[:, None, None] + 1
    y, x = torch.meshgrid(torch.linspace(0, 3, 16), torch.linspace(0, 3, 16), indexing="ij")
    return ((k * x + y).sin() * (k * y - x).cos() + noise * torch.randn(len(labels), 16, 16))[:, None]


class Grid(nn.Module):
    """A game on a board of 4 × 4: chances of eight moves, some of which are not allowed, and a value."""

    def __init__(self, width: int = 32, moves: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.moves, self.value = nn.Linear(width, moves), nn.Linear(width, 1)

    def forward(self, board: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(board)
        return self.moves(seen), self.value(seen).squeeze(1)


def played(model: nn.Module, batch: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """Log-chances of all moves, and of the one taken, and what was gained over the value; all float32."""
    board = torch.randn(batch, 16)
    with half():
        moves, value = model(board)
    chances, value = moves.float().log_softmax(1), value.float()
    move = torch.multinomial(chances.detach().exp(), 1)
    reward = (move[:, 0] == board[:, :8].argmax(1)).float()
    return chances, chances.gather(1, move)[:, 0], reward - value
