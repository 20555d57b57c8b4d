"""A watch that does nothing, and what its methods answer: something to enter around a method of torch."""

# ruff: noqa: ARG002 - a null object takes the arguments of the real one

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from .guard import Report, guard
from .internals import Factors, Scaler, UnscaleGrads

Span: TypeAlias = AbstractContextManager[object]


class Around:
    """Around a method of torch: `before()` as it is entered, `after(what before answered, raised)` as it is left.

    `after` gets None where `before` failed.
    """

    def __init__(
        self, where: str, report: Report, before: Callable[[], Any], after: Callable[[Any, bool], None]
    ) -> None:
        self._guard = guard(where, report)
        self._before = before
        self._after = after
        self._noted: Any = None

    def __enter__(self) -> None:
        with self._guard:
            self._noted = self._before()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            self._after(self._noted, kind is not None)


class Unwatched:
    """Stands in for a `Watch` where nothing is to be observed: every method does nothing."""

    def scaled(self, scaler: Scaler, outputs: object, scaled: object) -> None:
        """As `Watch.scaled`."""

    def unscaling(self, scaler: Scaler, optimizer: Optimizer) -> Span:
        """As `Watch.unscaling`."""
        return nullcontext()

    def gradients(
        self, scaler: Scaler, optimizer: Optimizer, torchs: UnscaleGrads, factors: Factors, *, fused: bool
    ) -> dict[torch.device, Tensor] | None:
        """As `Watch.gradients`: the method is still to be called."""
        return None

    def stepping(
        self, scaler: Scaler, optimizer: Optimizer, args: Sequence[object], kwargs: dict[str, Any]
    ) -> Span:
        """As `Watch.stepping`."""
        return nullcontext()

    def updating(self, scaler: Scaler, new_scale: object) -> Span:
        """As `Watch.updating`."""
        return nullcontext()

    def restoring(self, scaler: Scaler, state: dict[str, Any]) -> Span:
        """As `Watch.restoring`."""
        return nullcontext()


UNWATCHED: Final = Unwatched()
