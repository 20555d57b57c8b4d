"""Frameworks for large models: Megatron-core, ColossalAI, DeepSpeed, fairseq. Most have a hysteresis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ._base import Counting, Iterating, Stopped, single


@dataclass
class Megatron(Counting):
    """Megatron-core's DynamicGradScaler: `hysteresis` overflows before the first backoff, filled again by growth. N."""

    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale, self.left = single(self.initial_scale), self.hysteresis

    def interval(self) -> int:
        return self.growth_interval

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(single(self.scale * single(self.backoff_factor)), single(self.min_scale))
            return
        self.clean += 1
        if self.clean == self.growth_interval:
            self.clean, self.left = 0, self.hysteresis
            self.scale = single(self.scale * single(self.growth_factor))


@dataclass
class ColossalAI(Counting):
    """ColossalAI's DynamicGradScaler: as Megatron's, with a floor and a cap only where asked. N."""

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 2
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale = single(self.initial_scale)

    def interval(self) -> int:
        return self.growth_interval

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean, self.overflows = 0, self.overflows + 1
            if self.overflows >= self.hysteresis:
                backed = single(self.scale * single(self.backoff_factor))
                self.scale = backed if self.min_scale is None else max(backed, single(self.min_scale))
            return
        self.clean += 1
        if self.clean == self.growth_interval:
            self.clean = self.overflows = 0
            grown = single(self.scale * single(self.growth_factor))
            self.scale = grown if self.max_scale is None else min(grown, single(self.max_scale))


@dataclass
class DeepSpeedZeRO(Iterating):
    """DeepSpeed ZeRO's DynamicLossScaler, releases from 0.17.1: hysteresis, and it raises at the floor.

    N + 1 from the start and after each overflow, then N. A backoff does not fill the hysteresis again.
    """

    init_scale: float = 2.0**16
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    scale_factor: float = 2.0
    left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale, self.left = self.init_scale, self.delayed_shift

    def counted(self) -> int:
        """Clean attempts before this one since the last overflow."""
        return self.iteration - self.last - 1

    def quiet(self) -> int:
        counted = self.counted()
        return self.scale_window - counted if counted == 0 else (-counted) % self.scale_window

    def advance(self, clean: int) -> None:
        self.iteration += clean
        if clean and self.consecutive_hysteresis:
            self.left = self.delayed_shift

    def update(self, overflow: bool) -> None:
        if overflow:
            if math.isinf(self.scale):
                raise Stopped("DeepSpeed raises: its message needs a finite loss scale")
            self._back_off()
            self.last = self.iteration
        else:
            self._clean()
        self.iteration += 1

    def _back_off(self) -> None:
        if self.delayed_shift == 1 or self.left == 1:
            if self.scale == self.min_scale and self.raise_error_at_min_scale:
                raise Stopped("DeepSpeed raises: the loss scale is at its minimum already")
            self.scale = max(self.scale / self.scale_factor, self.min_scale)
        else:
            self.left -= 1

    def _clean(self) -> None:
        if self.consecutive_hysteresis:
            self.left = self.delayed_shift
        if self.quiet() == 0:
            if not self.consecutive_hysteresis:
                self.left = self.delayed_shift
            self.scale *= self.scale_factor


@dataclass
class DeepSpeedZeRO016(DeepSpeedZeRO):
    """DeepSpeed ZeRO's DynamicLossScaler, releases up to 0.17.0. Always N."""

    def counted(self) -> int:
        return self.iteration - self.last

    def quiet(self) -> int:
        return (-self.counted()) % self.scale_window


@dataclass
class DeepSpeedFP16(Iterating):
    """DeepSpeed's fp16 optimizers without ZeRO: no hysteresis, a floor, never raises. N + 1 as ZeRO's, then N."""

    init_scale: float = 2.0**32
    scale_window: int = 1000
    min_scale: float = 1.0
    scale_factor: float = 2.0

    def __post_init__(self) -> None:
        self.scale = self.init_scale

    def quiet(self) -> int:
        counted = self.iteration - self.last - 1
        return self.scale_window if counted == 0 else (-counted) % self.scale_window

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / self.scale_factor, self.min_scale)
            self.last = self.iteration
        elif self.quiet() == 0:
            self.scale *= self.scale_factor
        self.iteration += 1


@dataclass
class Fairseq(Iterating):
    """fairseq's DynamicLossScaler: backs off once overflows are more than `tolerance` of the attempts; raises at its minimum. N."""

    init_scale: float = 2.0**15
    scale_factor: float = 2.0
    scale_window: int = 2000
    tolerance: float = 0.0
    threshold: float | None = None
    min_loss_scale: float = 1e-4
    last_rescale: int = field(default=-1, init=False)
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale = self.init_scale

    def quiet(self) -> int:
        return self.before_multiple(self.scale_window)

    def update(self, overflow: bool) -> None:
        if overflow:
            self._back_off()
        elif self.quiet() == 0:
            self.scale, self.last_rescale = self.scale * self.scale_factor, self.iteration
        self.iteration += 1

    def _back_off(self) -> None:
        before = self.scale
        since = self.iteration - self.last_rescale
        self.last, self.overflows = self.iteration, self.overflows + 1
        if self.overflows / since >= self.tolerance:
            lowered = self.scale / self.scale_factor
            self.scale = lowered if self.threshold is None else max(lowered, self.threshold)
            self.last_rescale, self.overflows = self.iteration, 0
        if self.scale <= self.min_loss_scale:
            self.scale = before
            raise Stopped("fairseq raises: the loss scale has reached its minimum")
