"""PyTorch and apex."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ._base import Counting, Iterating, Stopped, single


@dataclass
class Torch(Counting):
    """torch.amp.GradScaler, and FSDP's ShardedGradScaler where its scale lies on CUDA. N; grows only to what is finite."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        self.scale = single(self.init_scale)

    def interval(self) -> int:
        return self.growth_interval

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.clean = single(self.scale * self.backoff_factor), 0
            return
        self.clean += 1
        if self.clean == self.growth_interval:
            grown = single(self.scale * self.growth_factor)
            self.scale, self.clean = grown if math.isfinite(grown) else self.scale, 0


@dataclass
class ShardedOnCpu(Torch):
    """FSDP's ShardedGradScaler with its scale on the CPU: float32 factors, grows into infinity. N."""

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.clean = single(self.scale * single(self.backoff_factor)), 0
            return
        self.clean += 1
        if self.clean == self.growth_interval:
            self.scale, self.clean = single(self.scale * single(self.growth_factor)), 0


@dataclass
class Apex(Counting):
    """apex.amp: Python numbers, capped, floored where asked; its unscaling divides by a scale of 0 and raises. N.

    It takes a scale_factor, and uses 2.
    """

    init_scale: float = 2.0**16
    scale_window: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24

    def __post_init__(self) -> None:
        self.scale = min(self.max_loss_scale, self.init_scale)

    def interval(self) -> int:
        return self.scale_window

    def update(self, overflow: bool) -> None:
        if self.scale == 0:
            raise Stopped("apex divides by a scale of 0")
        if overflow:
            self.scale = max(self.min_loss_scale or 0.0, self.scale / 2.0)
            self.clean = 0
            return
        self.clean += 1
        if self.clean == self.scale_window:
            self.scale, self.clean = min(self.max_loss_scale, self.scale * 2.0), 0


@dataclass
class ApexFP16Utils(Iterating):
    """apex.fp16_utils' DynamicLossScaler: a floor of 1, no cap. N."""

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000

    def __post_init__(self) -> None:
        self.scale = self.init_scale

    def quiet(self) -> int:
        return self.before_multiple(self.scale_window)

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.last = max(self.scale / self.scale_factor, 1.0), self.iteration
        elif self.quiet() == 0:
            self.scale *= self.scale_factor
        self.iteration += 1
