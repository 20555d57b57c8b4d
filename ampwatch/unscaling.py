"""The pass over the gradients of one scaler: their statistics, and their unscaling in the same read.

The scaler asks for `unscale` where torch's own method would run and would raise nothing; for `read` everywhere else,
before torch's method runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from . import internals
from .guard import guard
from .registry import Sink
from .stats.choose import REFERENCE, Statistics, Unscale, choose
from .stats.touched import Touched

BY_REFERENCE: Final = "statistics are taken by the reference"


class Pass:
    """Makes the pass by the implementation it is given; should that fail, by the reference from then on.

    Where it fails after it has begun to write, no other pass may follow: it would divide some gradients by the scale
    twice. They are marked as overflowed instead, so that torch skips the step and backs off.

    Arguments:
        statistics: the implementation.
        recorder: told of its failure.
    """

    def __init__(self, statistics: Statistics, recorder: Sink) -> None:
        self._statistics, self._recorder = statistics, recorder

    @property
    def name(self) -> str:
        """Of the implementation, for the run's header."""
        return self._statistics.name

    @property
    def unscales(self) -> bool:
        """Whether `unscale` reads the gradients once."""
        return self._statistics.unscale is not None

    def read(self, by_device: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The statistics of gradients, (n, WIDTH) float64 on each device. Synchronisation: none."""
        return list(map(self._read, by_device))

    def unscale(
        self, by_device: Sequence[Sequence[Tensor]], replicas: internals.Replicas
    ) -> list[Tensor] | None:
        """Check and unscale gradients in place, as torch does.

        Returns: the statistics of what they were, as `read`; None if they could not be taken. found_inf is 1 where a
            gradient is not finite, or where a kernel left its work half done.
        Errors: torch's own, and no other.
        Synchronisation: none.
        """
        rows = [self._unscale(grads, *replicas.on(grads[0].device)) for grads in by_device]
        known = [row for row in rows if row is not None]
        return known if len(known) == len(rows) else None

    def _read(self, grads: Sequence[Tensor]) -> Tensor:
        if self.name != REFERENCE:
            with guard(self._place, self._recorder.fault, BY_REFERENCE):
                return self._statistics.compute(grads)
            self._give_up_kernel()
        return self._statistics.compute(grads)

    def _unscale(self, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor | None:
        kernel = self._statistics.unscale
        if kernel is not None:
            rows = self._by_kernel(kernel, grads, found_inf, inv_scale)
            if isinstance(rows, Tensor):
                return rows
            if isinstance(rows, Touched):
                found_inf.fill_(1)
                self._report_touched(rows)
                return None
            self._give_up_kernel()
        rows = None
        with guard("scaler.gradients", self._recorder.fault):
            rows = self._statistics.compute(grads)
        internals.unscale_(grads, found_inf, inv_scale)
        return rows

    def _by_kernel(
        self, kernel: Unscale, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
    ) -> Tensor | Touched | None:
        """The statistics; None if it failed and has written nothing."""
        with guard(self._place, self._recorder.fault, BY_REFERENCE):
            try:
                return kernel(grads, found_inf, inv_scale)
            except Touched as touched:
                return touched
        return None

    def _report_touched(self, touched: Touched) -> None:
        try:
            with guard(self._place, self._recorder.fault, f"this step is skipped, then {BY_REFERENCE}"):
                raise touched
        finally:
            self._give_up_kernel()

    @property
    def _place(self) -> str:
        return f"stats.{self.name}"

    def _give_up_kernel(self) -> None:
        self._statistics = choose(REFERENCE)
        with guard("scaler.describe", self._recorder.fault):
            self._recorder.describe(statistics=self.name)
