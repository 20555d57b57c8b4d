"""Keras, PaddlePaddle, MindSpore."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ._base import Counting, Iterating, Stopped, flushed, single


@dataclass
class Keras(Counting):
    """Keras 3's LossScaleOptimizer: halves without a floor, doubles. N. The JAX and TensorFlow backends flush subnormals."""

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    flush_subnormals: bool = False

    def __post_init__(self) -> None:
        self.scale = single(self.initial_scale)

    def interval(self) -> int:
        return self.dynamic_growth_steps

    def update(self, overflow: bool) -> None:
        if overflow:
            halved = self.scale * 0.5
            self.scale, self.clean = (flushed if self.flush_subnormals else single)(halved), 0
            return
        self.clean += 1
        if self.clean >= self.dynamic_growth_steps:
            self.scale, self.clean = single(self.scale * 2.0), 0


@dataclass
class Keras2(Counting):
    """tf_keras: halves to 1 and raises what lies below it, doubles to what is finite. N."""

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        self.scale = single(self.initial_scale)

    def interval(self) -> int:
        return self.dynamic_growth_steps

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.clean = max(single(self.scale / single(self.multiplier)), 1.0), 0
            return
        self.clean += 1
        if self.clean >= self.dynamic_growth_steps:
            grown = single(self.scale * single(self.multiplier))
            self.scale, self.clean = grown if math.isfinite(grown) else self.scale, 0


@dataclass
class Paddle(Counting):
    """paddle.amp.GradScaler of the dynamic graph: backs off at the n-th overflow in a row. N."""

    init_loss_scaling: float = 2.0**16
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    incr_every_n_steps: int = 2000
    decr_every_n_nan_or_inf: int = 1
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale = single(self.init_loss_scaling)

    def interval(self) -> int:
        return self.incr_every_n_steps

    def advance(self, clean: int) -> None:
        self.clean += clean
        self.overflows = 0 if clean else self.overflows

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean, self.overflows = 0, self.overflows + 1
            if self.overflows == self.decr_every_n_nan_or_inf:
                self.scale, self.overflows = self.lowered(), 0
            return
        self.overflows, self.clean = 0, self.clean + 1
        if self.clean == self.incr_every_n_steps:
            self.scale, self.clean = self.raised(), 0

    def lowered(self) -> float:
        return single(self.scale * single(self.decr_ratio))

    def raised(self) -> float:
        return single(self.scale * single(self.incr_ratio))


@dataclass
class PaddleStatic(Paddle):
    """Paddle's static graph: as its dynamic one, with a floor of 1, and growth only to what is finite. N."""

    def lowered(self) -> float:
        return max(super().lowered(), 1.0)

    def raised(self) -> float:
        grown = super().raised()
        return grown if math.isfinite(grown) else self.scale


@dataclass
class MindSporeManager(Iterating):
    """MindSpore's DynamicLossScaleManager, its own method: a floor of 1; raises at the 1,001st overflow in a row. N."""

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2.0
    scale_window: int = 2000
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale, self.iteration, self.last = self.init_loss_scale, 1, 0

    def quiet(self) -> int:
        return (self.last - self.iteration) % self.scale_window

    def advance(self, clean: int) -> None:
        self.iteration += clean
        self.overflows = 0 if clean else self.overflows

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / self.scale_factor, 1.0)
            self.last, self.overflows = self.iteration, self.overflows + 1
            if self.overflows > 1000:
                raise Stopped("MindSpore raises: 1,001 overflows in a row")
        else:
            self.overflows = 0
            if self.quiet() == 0:
                self.scale *= self.scale_factor
        self.iteration += 1


@dataclass
class MindSporeCell(Iterating):
    """MindSpore's update cell, which is what trains: a floor of 1, never raises. N."""

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2.0
    scale_window: int = 2000

    def __post_init__(self) -> None:
        self.scale, self.iteration, self.last = single(self.init_loss_scale), 1, 0

    def quiet(self) -> int:
        return max(self.scale_window - (self.iteration - self.last), 0)

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.last = max(single(self.scale / single(self.scale_factor)), 1.0), self.iteration
        elif self.quiet() == 0:
            self.scale, self.last = single(self.scale * single(self.scale_factor)), self.iteration
        self.iteration += 1
