"""Models to watch, and how observers are read."""

from __future__ import annotations

import math

import torch
from torch import nn


def read(observer):
    """The data of the event that an observer's observation becomes."""
    seen = observer.collect()
    assert seen.values.ndim == 1
    assert seen.values.dtype == torch.float64
    return seen.decode(seen.values.numpy())


def forward(model, *inputs, dtype=torch.float16, **named):
    with torch.autocast("cpu", dtype=dtype):
        return model(*inputs, **named)


def backward(model, *inputs, dtype=torch.float16, scale=2.0**10):
    (forward(model, *inputs, dtype=dtype).float().pow(2).mean() * scale).backward()


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))


class Attention(nn.Module):
    """Scores without a module of their own, and `sharpness` to make them overflow."""

    def __init__(self, sharpness=1.0):
        super().__init__()
        self.sharpness = sharpness
        self.query, self.key, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, mask=None):
        scores = (self.query(x) * self.sharpness) @ (self.key(x) * self.sharpness).transpose(-2, -1)
        return self.out((scores if mask is None else scores + mask).softmax(-1).to(x.dtype) @ x)


class Transformer(nn.Module):
    def __init__(self, *sharpness):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Attention(s) for s in sharpness)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x, mask=self.mask)
        return {"logits": x}


IDS = torch.arange(8).expand(2, 8)
