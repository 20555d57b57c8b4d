"""The rules by which loss scalers move their scale, exactly: one class for each scaler (docs/numerics.md, section 4).

A policy is made with the arguments of the scaler it follows, under their names, and has that scaler's counters.

    policy = Torch(init_scale=2.0**16, growth_interval=2000)
    policy.update(overflow=True)
    policy.scale                     # 32768.0

`N` is the number of clean attempts up to and including the one that grows. Scalers that keep the scale in a
tensor round it to float32, those that keep it in a Python number do not; where no floor or cap is named there is
none, and the scale reaches 0 or infinity and stays there.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Final

NEVER: Final = 1 << 62  # more clean attempts than any run has
_TINY: Final = 2.0**-126  # smallest normal float32
_MAX: Final = (2 - 2.0**-23) * 2.0**127  # largest float32
_SINGLE: Final = struct.Struct("f")


class Stopped(Exception):
    """The scaler raises here, and training ends."""


def single(value: float) -> float:
    """The float32 nearest to it."""
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def flushed(value: float) -> float:
    """The float32 nearest to it, subnormals as zero."""
    rounded = single(value)
    return rounded if rounded >= _TINY else 0.0


@dataclass
class Policy:
    """A loss scale that moves.

    `scale` multiplies the loss of the next attempt.
    """

    scale: float = field(default=1.0, init=False)

    def update(self, overflow: bool) -> None:
        """One attempt at `scale`. Stopped where the scaler raises."""
        raise NotImplementedError

    def quiet(self) -> int:
        """The number of clean attempts from here on that leave the scale as it is, at least."""
        raise NotImplementedError

    def advance(self, clean: int) -> None:
        """So many clean attempts at once, no more than `quiet()`."""
        raise NotImplementedError


@dataclass
class _Counting(Policy):
    """Policies that count clean attempts from 0 and grow at the N-th."""

    clean: int = field(default=0, init=False)

    def interval(self) -> int:
        raise NotImplementedError

    def quiet(self) -> int:
        left = self.interval() - self.clean - 1
        return left if left >= 0 else NEVER

    def advance(self, clean: int) -> None:
        self.clean += clean


@dataclass
class Torch(_Counting):
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
class Apex(_Counting):
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
class Megatron(_Counting):
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
class ColossalAI(_Counting):
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
class Paddle(_Counting):
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
class Keras(_Counting):
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
class Keras2(_Counting):
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
class Jmp(_Counting):
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
class Flax(_Counting):
    """flax DynamicScale: grows at the clean attempt after `growth_interval` of them, to float32's largest. N + 1."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    minimum_scale: float | None = _TINY

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
            self.scale, self.clean = min(single(self.scale * single(self.growth_factor)), _MAX), 0
        else:
            self.clean += 1


@dataclass
class _Iterating(Policy):
    """Policies that count every attempt, and the clean ones by the distance from the last overflow."""

    iteration: int = field(default=0, init=False)
    last: int = field(default=-1, init=False)

    def window(self) -> int:
        raise NotImplementedError

    def quiet(self) -> int:
        return self.window() - 1 - (self.iteration - self.last - 1) % self.window()

    def advance(self, clean: int) -> None:
        self.iteration += clean


@dataclass
class DeepSpeedZeRO(_Iterating):
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

    def window(self) -> int:
        return self.scale_window

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
class DeepSpeedFP16(_Iterating):
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
class ApexFP16Utils(_Iterating):
    """apex.fp16_utils' DynamicLossScaler: a floor of 1, no cap. N."""

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000

    def __post_init__(self) -> None:
        self.scale = self.init_scale

    def window(self) -> int:
        return self.scale_window

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.last = max(self.scale / self.scale_factor, 1.0), self.iteration
        elif self.quiet() == 0:
            self.scale *= self.scale_factor
        self.iteration += 1


@dataclass
class Fairseq(_Iterating):
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

    def window(self) -> int:
        return self.scale_window

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


@dataclass
class MindSporeManager(_Iterating):
    """MindSpore's DynamicLossScaleManager, its own method: a floor of 1; raises at the 1,001st overflow in a row. N."""

    init_loss_scale: float = 2.0**24
    scale_factor: float = 2.0
    scale_window: int = 2000
    overflows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.scale, self.iteration, self.last = self.init_loss_scale, 1, 0

    def window(self) -> int:
        return self.scale_window

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
class MindSporeCell(_Iterating):
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


POLICIES: Final[dict[str, type[Policy]]] = {
    "torch": Torch,
    "fsdp-cpu": ShardedOnCpu,
    "apex": Apex,
    "apex-fp16-utils": ApexFP16Utils,
    "deepspeed": DeepSpeedZeRO,
    "deepspeed-0.16": DeepSpeedZeRO016,
    "deepspeed-fp16": DeepSpeedFP16,
    "megatron": Megatron,
    "colossalai": ColossalAI,
    "fairseq": Fairseq,
    "paddle": Paddle,
    "paddle-static": PaddleStatic,
    "keras": Keras,
    "keras2": Keras2,
    "jmp": Jmp,
    "flax": Flax,
    "mindspore": MindSporeCell,
    "mindspore-manager": MindSporeManager,
    "optax": ApplyIfFinite,
    "fixed": Fixed,
}
