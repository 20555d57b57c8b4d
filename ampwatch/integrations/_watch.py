"""What every framework comes down to: a scaler that it has built, or optimizers without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampwatch.optimizer import watch_optimizer
from ampwatch.scaler import watch


def watch_either(
    scaler: torch.amp.GradScaler | None,
    optimizers: Iterable[Optimizer],
    model: nn.Module | None,
    **options: Any,
) -> None:
    """Watch the scaler in place; where there is none, each of the optimizers."""
    if scaler is not None:
        watch(scaler, model=model, **options)
        return
    for optimizer in optimizers:
        watch_optimizer(optimizer, model=model, **options)
