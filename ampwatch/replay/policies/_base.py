"""What policies share: the scale, its rounding, and the two ways of counting clean attempts."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final

NEVER: Final = 1 << 62  # more clean attempts than any run has
TINY: Final = 2.0**-126  # smallest normal float32
MAX: Final = (2 - 2.0**-23) * 2.0**127  # largest float32
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
    return rounded if rounded >= TINY else 0.0


@dataclass
class Policy(ABC):
    """A loss scale that moves.

    `scale` multiplies the loss of the next attempt.
    """

    scale: float = field(default=1.0, init=False)

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """One attempt at `scale`. Stopped where the scaler raises."""

    @abstractmethod
    def quiet(self) -> int:
        """The number of clean attempts from here on that leave the scale as it is, at least."""

    @abstractmethod
    def advance(self, clean: int) -> None:
        """So many clean attempts at once, no more than `quiet()`."""


@dataclass
class Counting(Policy):
    """Policies that count clean attempts from 0 and grow at the N-th."""

    clean: int = field(default=0, init=False)

    @abstractmethod
    def interval(self) -> int:
        """N."""

    def quiet(self) -> int:
        left = self.interval() - self.clean - 1
        return left if left >= 0 else NEVER

    def advance(self, clean: int) -> None:
        self.clean += clean


@dataclass
class Iterating(Policy):
    """Policies that count every attempt, and the clean ones by the distance from the last overflow."""

    iteration: int = field(default=0, init=False)
    last: int = field(default=-1, init=False)

    def before_multiple(self, window: int) -> int:
        """Clean attempts before the one whose distance from the last overflow is a multiple of the window."""
        return window - 1 - (self.iteration - self.last - 1) % window

    def advance(self, clean: int) -> None:
        self.iteration += clean
