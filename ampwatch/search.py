"""The search for what makes a loss that is not finite: modules, and operations that are no modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .forward_search import ForwardSearch
from .hooks import Observation, Observer
from .operations import OperationSearch


class Search:
    """Both observers of a forward pass as one. No synchronisation."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = ForwardSearch(model)
        self._operations = OperationSearch(model)

    @property
    def parts(self) -> tuple[Observer, ...]:
        """The two."""
        return self._modules, self._operations

    def arm(self) -> None:
        """Put the hooks on."""
        self._modules.arm()
        self._operations.arm()

    def restart(self) -> None:
        """Forget what was seen, and go on looking."""
        self._modules.restart()
        self._operations.restart()

    def pass_ended(self, losses: Sequence[Tensor]) -> None:
        """These losses are being scaled: what is called from now on belongs to the next pass."""
        self._modules.pass_ended()
        self._operations.pass_ended(losses)

    def disarm(self) -> None:
        """Take the hooks off."""
        self._modules.disarm()
        self._operations.disarm()

    def collect(self) -> list[Observation]:
        """What was seen."""
        seen = (self._modules.collect(), self._operations.collect())
        return [observation for observation in seen if observation is not None]
