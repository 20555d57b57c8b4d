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
from .stats.choose import REFERENCE, Statistics, choose
from .stats.touched import Touched, touching

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
    ) -> tuple[bool, list[Tensor] | None]:
        """Check and unscale gradients in place, as torch does, by the kernel.

        Returns: whether torch's method must not follow; and the statistics of what they were, as `read`, or None if
            they could not be taken. Where a kernel left its work half done, every found_inf is 1.
        Synchronisation: none.
        """
        touched = None
        with guard(self._place, self._fault, BY_REFERENCE):
            try:
                return True, self._by_kernel(by_device, replicas)
            except Touched as error:
                touched = error
        if touched is None:
            self._give_up_kernel()
            return False, self.read(by_device)
        for flag in replicas.found_inf().values():
            flag.fill_(1)
        self._report_touched(touched)
        return True, None

    def _read(self, grads: Sequence[Tensor]) -> Tensor:
        if self.name != REFERENCE:
            with guard(self._place, self._fault, BY_REFERENCE):
                return self._statistics.compute(grads)
            self._give_up_kernel()
        return self._statistics.compute(grads)

    def _by_kernel(self, by_device: Sequence[Sequence[Tensor]], replicas: internals.Replicas) -> list[Tensor]:
        """The statistics. Errors: `Touched`, if anything was written before the error."""
        kernel = self._statistics.unscale
        assert kernel is not None
        rows: list[Tensor] = []
        for grads in by_device:
            with touching(bool(rows)):
                rows.append(kernel(grads, *replicas.on(grads[0].device)))
        return rows

    def _report_touched(self, touched: Touched) -> None:
        try:
            with guard(self._place, self._fault, f"this step is skipped, then {BY_REFERENCE}"):
                raise touched
        finally:
            self._give_up_kernel()

    def _fault(self, where: str, error: Exception, count: int) -> None:
        self._recorder.fault(where, error, count)
        if self._statistics.on_fault is not None:
            self._statistics.on_fault(error)

    @property
    def _place(self) -> str:
        return f"stats.{self.name}"

    def _give_up_kernel(self) -> None:
        self._statistics = choose(REFERENCE)
        with guard("scaler.describe", self._recorder.fault):
            self._recorder.describe(statistics=self.name)
