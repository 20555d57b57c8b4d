"""The pass over the gradients of one scaler: their statistics, and their unscaling in the same read.

The scaler asks for `unscale` where torch's own method would run and would raise nothing; for `read` everywhere else,
before torch's method runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import internals
from .guard import Guard, guard
from .registry import Sink
from .stats.choose import REFERENCE, Statistics, choose


class Pass:
    """Makes the pass by the implementation it is given; should that fail, by the reference from then on.

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

        Returns: the statistics of what they were, as `read`; None if they could not be taken.
        Errors: torch's own, and no other.
        Synchronisation: none.
        """
        rows = [self._unscale(grads, *replicas.on(grads[0].device)) for grads in by_device]
        known = [row for row in rows if row is not None]
        return known if len(known) == len(rows) else None

    def _read(self, grads: Sequence[Tensor]) -> Tensor:
        if self.name != REFERENCE:
            with self._kernel_guard():
                return self._statistics.compute(grads)
            self._give_up_kernel()
        return self._statistics.compute(grads)

    def _unscale(self, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor | None:
        kernel = self._statistics.unscale
        if kernel is not None:
            with self._kernel_guard():
                return kernel(grads, found_inf, inv_scale)
            self._give_up_kernel()
        rows = None
        with guard("scaler.gradients", self._recorder.fault):
            rows = self._statistics.compute(grads)
        internals.unscale_(grads, found_inf, inv_scale)
        return rows

    def _kernel_guard(self) -> Guard:
        return guard(f"stats.{self.name}", self._recorder.fault, "statistics are taken by the reference")

    def _give_up_kernel(self) -> None:
        self._statistics = choose(REFERENCE)
        with guard("scaler.describe", self._recorder.fault):
            self._recorder.describe(statistics=self.name)
