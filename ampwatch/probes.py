"""The observers of one scaler: which are armed, for how long, and what they have left to record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from torch import Tensor, nn

from .escalation import Escalation
from .hooks import Observation, Observer
from .observers import AutocastProbe, BackwardOrder, FiniteCheck, ForwardSearch, OriginProbe

ORIGIN_EVERY: Final = 1000  # attempts from one look at the origin of the gradients to the next
CHECK_EVERY: Final = 200  # attempts from one finite check to the next


class Probes:
    """Arms and disarms observers as the attempts go by. Training thread only; nothing here synchronises.

    With a model, autocast dtype, backward order and origin are looked at in the first pass. Without one, order and
    origin are looked at one attempt after an optimizer was first seen.

    Arguments:
        model: whose forward pass and whose parameters are observed.
        index: the index of a parameter in the records.
    """

    def __init__(self, model: nn.Module | None, index: Callable[[Tensor], int]) -> None:
        self._model = model
        self._index = index
        self._armed: list[Observer] = []  # until each has seen something
        self._looked_at: set[int] = set()  # optimizers whose gradients' origin was looked at
        self._has_order = model is not None
        self._finite = FiniteCheck(model) if model is not None else None
        self._search: ForwardSearch | None = None
        self._seen: list[Observation] = []
        self._attempts = 0
        self._forward_passes = 0
        if model is not None:
            parameters = self._numbered(model.parameters())
            self._arm(AutocastProbe(model), BackwardOrder(parameters), OriginProbe(parameters))

    def forward_ended(self) -> None:
        """A loss was scaled: the forward pass that was searched is over."""
        self._forward_passes += 1
        if self._forward_passes == 1 and self._finite is not None:
            self._finite.arm()  # what is not finite before any training is no fault
            self._check()
        if self._search is not None:
            search, self._search = self._search, None
            search.disarm()
            self._keep(search.collect())

    def optimizer(self, index: int, parameters: Iterable[Tensor]) -> None:
        """An optimizer's gradients are being unscaled: arm for its next ones what has not looked at them yet."""
        if index in self._looked_at:
            return
        self._looked_at.add(index)
        if self._model is not None and self._attempts == 0:  # armed over the whole model
            return
        numbered = self._numbered(parameters)
        self._arm(OriginProbe(numbered))
        if not self._has_order:
            self._has_order = True
            self._arm(BackwardOrder(numbered))

    def collect(self) -> list[Observation]:
        """At the end of an attempt: what has been seen; the observers that saw it are taken off."""
        for observer in list(self._armed):
            observation = observer.collect()
            if observation is not None:
                observer.disarm()
                self._armed.remove(observer)
                self._keep(observation)
        self._attempts += 1
        if self._attempts % ORIGIN_EVERY == 0:
            self._looked_at.clear()
        if self._attempts % CHECK_EVERY == 0:
            self._check()
        return self._take()

    def follow(self, escalation: Escalation) -> list[Observation]:
        """Look closer where a run of skipped attempts calls for it: at once, and in the next forward pass."""
        if escalation.take_check():
            self._check()
        if escalation.take_search() and self._model is not None and self._search is None:
            self._search = ForwardSearch(self._model)
            self._search.arm()
        return self._take()

    def close(self) -> None:
        """Take every hook off."""
        searching = [self._search] if self._search is not None else []
        for observer in [*self._armed, *searching]:
            observer.disarm()
        self._armed, self._search = [], None

    def _arm(self, *observers: Observer) -> None:
        for observer in observers:
            observer.arm()
            self._armed.append(observer)

    def _take(self) -> list[Observation]:
        seen, self._seen = self._seen, []
        return seen

    def _check(self) -> None:
        if self._finite is not None:
            self._keep(self._finite.collect())

    def _keep(self, observation: Observation | None) -> None:
        if observation is not None:
            self._seen.append(observation)

    def _numbered(self, parameters: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
        return [(self._index(p), p) for p in parameters if p.requires_grad]
