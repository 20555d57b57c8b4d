"""Real training loops in float16 autocast on a CPU, narrow and short, that tests record and have diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampwatch
from ampwatch.diagnosis import Finding, diagnose_run

Scaler = Callable[..., torch.amp.GradScaler]


@contextmanager
def recorded(directory: Path) -> Iterator[Scaler]:
    """Makes scalers that record under a folder; the run is finished at the end, whatever the loop did."""

    def make(**arguments: Any) -> torch.amp.GradScaler:
        settings = ampwatch.Settings.load(environ={}, dir=str(directory), run="loop", quiet=True)
        scaler: torch.amp.GradScaler = ampwatch.GradScaler("cpu", settings=settings, **arguments)
        return scaler

    try:
        yield make
    finally:
        ampwatch.finish()


@contextmanager
def recorded_optimizer(directory: Path) -> Iterator[Callable[..., torch.optim.Optimizer]]:
    """Watches optimizers that no scaler steps, as `recorded` does scalers."""

    def watched(optimizer: torch.optim.Optimizer, **arguments: Any) -> torch.optim.Optimizer:
        settings = ampwatch.Settings.load(environ={}, dir=str(directory), run="loop", quiet=True)
        return ampwatch.watch_optimizer(optimizer, settings=settings, **arguments)

    try:
        yield watched
    finally:
        ampwatch.finish()


def findings(directory: Path) -> list[Finding]:
    return diagnose_run(directory).findings()


def worse_than_info(directory: Path) -> list[Finding]:
    return [f for f in findings(directory) if f.severity != "info"]


def above_info(directory: Path) -> list[tuple[str, str]]:
    """(kind, severity) of what a person would be told."""
    return [(f.kind, f.severity) for f in worse_than_info(directory)]


def told(directory: Path) -> list[tuple[str, str, int, str]]:
    """(kind, severity, attempt it was first said at, tensor or else module) of what a person would be told."""
    return [(f.kind, f.severity, f.first_attempt, f.tensor or f.module) for f in worse_than_info(directory)]


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def train(
    model: nn.Module,
    scaler: torch.amp.GradScaler,
    loss_at: Callable[[int], Tensor],
    *,
    steps: int = 30,
    optimizer: torch.optim.Optimizer | None = None,
    clip: float | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """The loop that everyone writes; `loss_at(step)` runs under autocast."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_at(step)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


class Mixer(nn.Module):
    """Self-attention written out, as people's own code does; queries and keys may be made sharp."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores = (q * self.gain) @ (k * self.gain).mT * q.shape[-1] ** -0.5
        return self.out((scores + self.mask).softmax(-1).to(v.dtype) @ v)


class Transformer(nn.Module):
    """Two layers over 32 tokens, of which the data uses 20."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.mixers = nn.ModuleList(Mixer(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for mixer, norm in zip(self.mixers, self.norms, strict=True):
            x = x + mixer(norm(x))
        return self.head(x)

    def loss(self, seed: int) -> Tensor:
        """Mean cross-entropy of the next token on a batch drawn from the seed."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 20, (4, 17), generator=generator).cumsum(-1) % 20
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def mlp(width: int = 16, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, out))


def features(seed: int, rows: int = 32) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def regression(model: nn.Module, seed: int) -> Tensor:
    """Mean squared error against the sum of the features."""
    x = features(seed)
    return F.mse_loss(model(x).float(), x.sum(-1, keepdim=True))
