"""A character-level transformer that writes its attention out, as people's own code does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .text import VOCABULARY


@dataclass(frozen=True)
class Size:
    """Width, layers and heads of the model; rows and context (characters) of a batch."""

    width: int
    layers: int
    heads: int
    rows: int
    context: int


# float16 matrix products are up to 100 × slower than float32 on a CPU without native support
CPU = Size(width=64, layers=2, heads=4, rows=8, context=32)
CUDA = Size(width=256, layers=4, heads=8, rows=32, context=128)


class Attention(nn.Module):
    """Causal self-attention; `sharpness` multiplies queries and keys, 1.0 in a sane model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.sharpness = 1.0
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, context, width) → the same shape."""
        rows, context, width = x.shape
        heads = self.queries_keys_values(x).view(rows, context, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        logits = (q * self.sharpness) @ (k * self.sharpness).transpose(-2, -1) / (width // self.heads) ** 0.5
        future = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
        weights = logits.masked_fill(future, -torch.inf).softmax(-1)
        mixed: Tensor = self.out(
            (weights @ v.to(weights.dtype)).transpose(1, 2).reshape(rows, context, width)
        )
        return mixed


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, context, width) → the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CharTransformer(nn.Module):
    """Predicts the next character. About 0.12 M parameters at `CPU`, 3.3 M at `CUDA`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        """(rows, context) int64 → logits (rows, context, VOCABULARY)."""
        x = self.embedding(characters) + self.position.weight[: characters.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, characters: Tensor, following: Tensor) -> Tensor:
        """Mean cross-entropy in nats a character."""
        return cross_entropy(self(characters).flatten(0, 1), following.flatten())
