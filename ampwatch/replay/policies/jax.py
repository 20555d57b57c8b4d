"""JAX: jmp, flax, optax; and a scale that never moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ._base import MAX, NEVER, TINY, Counting, Policy, flushed, single


@dataclass
class Jmp(Counting):
    """jmp.DynamicLossScale; also mindspore.amp.DynamicLossScaler: a floor of 1, growth only to what is finite. N."""

    loss_scale: float = 2.0**15
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0
    through_jit: bool = False  # which forgets another floor than 1, and multiplies by the reciprocal

    def __post_init__(self) -> None:
        self.scale = single(self.loss_scale)
        if self.through_jit:
            self.min_loss_scale = 1.0

    def interval(self) -> int:
        return self.period

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.clean = max(single(self.min_loss_scale), self.lowered()), 0
            return
        self.clean += 1
        if self.clean >= self.period:
            grown = single(self.scale * single(self.factor))
            self.scale, self.clean = grown if math.isfinite(grown) else self.scale, 0

    def lowered(self) -> float:
        factor = single(self.factor)
        return single(self.scale * single(1.0 / factor) if self.through_jit else self.scale / factor)


@dataclass
class Flax(Counting):
    """flax DynamicScale: grows at the clean attempt after `growth_interval` of them, to float32's largest. N + 1."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    minimum_scale: float | None = TINY

    def __post_init__(self) -> None:
        self.scale = single(self.init_scale)

    def interval(self) -> int:
        return self.growth_interval + 1

    def update(self, overflow: bool) -> None:
        if overflow or self.scale == 0:  # 0 / 0 is not finite
            backed = flushed(self.scale * single(self.backoff_factor))
            self.scale = backed if self.minimum_scale is None else max(backed, single(self.minimum_scale))
            self.clean = 0
        elif self.clean == self.growth_interval:
            self.scale, self.clean = min(single(self.scale * single(self.growth_factor)), MAX), 0
        else:
            self.clean += 1


@dataclass
class ApplyIfFinite(Policy):
    """optax.apply_if_finite, which scales nothing: drops the first n updates in a row that are not finite, and applies the rest.

    `applied` tells whether the last attempt's update was.
    """

    max_consecutive_errors: int = 5
    overflows: int = field(default=0, init=False)
    applied: bool = field(default=False, init=False)

    def update(self, overflow: bool) -> None:
        self.overflows = self.overflows + 1 if overflow else 0
        self.applied = not 0 < self.overflows <= self.max_consecutive_errors

    def quiet(self) -> int:
        return NEVER

    def advance(self, clean: int) -> None:
        if clean:
            self.overflows, self.applied = 0, True


@dataclass
class Fixed(Policy):
    """A loss scale that never moves; 1 is no scaling at all."""

    init_scale: float = 1.0

    def __post_init__(self) -> None:
        self.scale = self.init_scale

    def update(self, overflow: bool) -> None:
        """Nothing."""

    def quiet(self) -> int:
        return NEVER

    def advance(self, clean: int) -> None:
        """Nothing."""
