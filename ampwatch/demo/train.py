"""One training run of the demonstration, through `ampwatch.GradScaler`, with or without a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ampwatch.recorder import log
from ampwatch.scaler import GradScaler
from ampwatch.settings import Settings

from . import text
from .model import CPU, CUDA, Attention, CharTransformer

Progress = Callable[[int, float, float, int], None]
"""Called with the steps done, the loss, the loss scale and the steps skipped so far."""


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Arguments:
        overflow_at: step from which the attention of the last layer multiplies its queries and keys by 256, which
            takes its logits above 65504; None for never.
        init_scale: the loss scale at the start; `fixed` keeps it there, as a static scale does.
    """

    name: str
    steps: int
    seed: int
    overflow_at: int | None = None
    init_scale: float = 2.0**16
    fixed: bool = False


def train(
    plan: Plan, *, settings: Settings | None = None, progress: Progress | None = None, device: str = "cpu"
) -> None:
    """Run the plan and record it as `settings` say. Synchronises at every step to show its progress."""
    size = CUDA if device == "cuda" else CPU
    torch.manual_seed(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    corpus = text.load()
    model = CharTransformer(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(
        device,
        init_scale=plan.init_scale,
        growth_interval=10**9 if plan.fixed else 100,
        model=model,
        settings=settings,
    )
    taken = _Taken(optimizer)
    for step in range(plan.steps):
        if step == plan.overflow_at:
            _sharpen(model)
        characters, following = text.batch(corpus, size.rows, size.context, generator)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = model.loss(characters.to(device), following.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log(step=step)
        if progress is not None:
            progress(step + 1, loss.item(), scaler.get_scale(), step + 1 - taken.steps)


class _Taken:
    """Counts the steps that an optimizer takes; that the scale fell does not tell, for at 0 it cannot."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.steps += 1


def _sharpen(model: CharTransformer) -> None:
    last = model.get_submodule(f"blocks.{len(model.blocks) - 1}.attention")
    assert isinstance(last, Attention)
    last.sharpness = 256.0
