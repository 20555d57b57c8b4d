"""The observers of one scaler: which are armed, for how long, and what they have left to record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import identity, internals
from .escalation import Escalation, Wanted
from .float32_check import Float32Check
from .hooks import Announcements, Observation, Observer
from .names import weakly
from .observers import (
    AutocastProbe,
    BackwardOrder,
    FiniteCheck,
    LocalGradients,
    OriginProbe,
    ReplicaProbe,
)
from .origins import Origins, Schedule
from .search import Search

CHECK_EVERY: Final = 200  # attempts from one finite check to the next
MOST_LOCAL: Final = (
    16  # tensors whose local gradients are looked at: the first in backward order, and the last
)
SEARCH_FOR: Final = 64  # attempts in which one of the stream that is to be searched must come


class Probes:
    """Arms and disarms observers as the attempts go by. Training thread only; nothing here synchronises.

    With a model, autocast dtype, backward order, origin and replicas are looked at in the first pass. Without one, and
    where its parameters get their shapes in that pass, order and origin are looked at one attempt after an optimizer
    was first seen. Later looks at the origin follow a `Schedule`.

    Arguments:
        model: whose forward pass and whose parameters are observed.
        index: the index of a parameter in the records; its second argument is the model that holds it, if it is that.
        announced: told of hooks that are put on and taken off.
        hooks: whether to look by hooks; without them only the finite checks are made.
    """

    def __init__(
        self,
        model: nn.Module | None,
        index: Callable[..., int],
        announced: Announcements,
        *,
        hooks: bool = True,
    ) -> None:
        self._announced, self._hooks = announced, hooks
        self._model = weakly(model)
        self._index = index
        self._armed: list[Observer] = []  # until each has seen something
        self._unscaled: dict[int, Sequence[Tensor]] = {}  # parameters of the optimizers of this attempt
        self._schedules: dict[int, Schedule] = {}
        self._origin: dict[int, OriginProbe] = {}  # the last one of each optimizer
        self._has_order = model is not None and not any(map(is_lazy, model.parameters()))
        self._finite = FiniteCheck(model) if model is not None else None
        self._is_called = False  # a module of the model was, outside of compiled graphs
        self._graphs = internals.compiled_graphs()
        self._search: Search | None = None
        self._searched = Wanted(-1, 0)
        self._search_until = 0
        self._local: LocalGradients | None = None
        self._local_stream = -1
        self._stream = -1  # of the attempt that ended last
        self._seen: list[Observation] = []
        self._attempts = 0
        self._forward_passes = 0
        if model is not None and hooks:
            looks: list[Observer] = [AutocastProbe(model), ReplicaProbe(model, index)]
            if self._has_order:
                parameters = [(index(p, model), p) for p in model.parameters() if p.requires_grad]
                looks += [BackwardOrder(parameters), OriginProbe(parameters)]
            self._arm(*looks, why="first_pass")
        if self._finite is not None:
            self._finite.arm()  # now, as what is not finite before any training is no fault

    def forward_ended(self, losses: Sequence[Tensor] = ()) -> None:
        """These losses are scaled: a forward pass is over."""
        self._forward_passes += 1
        if self._forward_passes == 1:
            self._check()  # a first pass can poison buffers
        if self._search is not None:
            self._search.pass_ended(losses)

    def optimizer(self, index: int, parameters: Sequence[Tensor]) -> None:
        """The gradients of an optimizer's parameters are being unscaled."""
        self._unscaled[index] = parameters

    def note(self, observation: Observation) -> None:
        """Keep what was seen elsewhere in this attempt."""
        self._keep(observation)

    def collect(self, stream: int = -1) -> list[Observation]:
        """At the end of an attempt of a stream: what has been seen; the observers that saw it are taken off."""
        armed = list(self._armed)
        try:
            for observer in armed:
                self._collect_from(observer)
        finally:
            self._announce([each for each in armed if each not in self._armed], "done")
        if self._search is not None:
            self._search_ended(self._search, stream)
        if self._local is not None:
            self._local_ended(self._local, stream)
        self._stream = stream
        self._attempts += 1
        if self._attempts % CHECK_EVERY == 0:
            self._check()
        return self._take()

    def follow(self, escalation: Escalation, origins: Origins) -> list[Observation]:
        """Look closer where what is known by now calls for it: at once, and in the next forward and backward pass."""
        unscaled, self._unscaled = self._unscaled, {}
        if self._hooks:
            self._look_closer(escalation, origins, unscaled)
        if escalation.take_check():
            self._check()
        return self._take()

    def close(self) -> None:
        """Take every hook off."""
        for observer in self._armed:
            observer.disarm()
        if self._search is not None:
            self._search.disarm()
        if self._local is not None:
            self._local.disarm()
        self._armed, self._search, self._local = [], None, None

    def _collect_from(self, observer: Observer) -> None:
        """Once it has seen something it is taken off; also where it fails, as it would at each attempt to come."""
        observation, is_done = None, True
        try:
            observation = observer.collect()
            is_done = observation is not None
        finally:
            if is_done:
                observer.disarm()
                self._armed.remove(observer)
                self._is_called = self._is_called or isinstance(observer, ReplicaProbe)
        self._keep(observation)

    @property
    def _is_eager(self) -> bool:
        """Whether modules are called one by one. What is compiled a search does not see, and would have compiled anew, or
        run without its graph: other bits, and another need for memory.
        """
        return self._is_called and internals.compiled_graphs() == self._graphs

    def _look_closer(
        self, escalation: Escalation, origins: Origins, unscaled: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """In the next forward and backward pass."""
        for index, parameters in unscaled.items():
            self._look_again(index, parameters, origins)
        if (suspects := escalation.take_overflowed(self._stream)) and identity.rank_and_world()[1] > 1:
            self._look_locally(suspects, unscaled)
        model, suspect = self._model(), escalation.take_suspect()
        if suspect and model is not None:
            self._arm(Float32Check(model, suspect), why="nan_at_first")
        wanted = escalation.take_search()
        if wanted is not None and model is not None and self._search is None and self._is_eager:
            self._search, self._searched = Search(model), wanted
            self._search_until = self._attempts + SEARCH_FOR
            self._search.arm()
            self._announce(self._search.parts, "loss_not_finite")

    def _search_ended(self, search: Search, stream: int) -> None:
        """An attempt was searched. One of another stream tells nothing of the one whose loss is not finite."""
        is_meant = stream == self._searched.stream
        if is_meant:
            self._seen += search.collect()
            self._searched = Wanted(stream, self._searched.attempts - 1)
        if self._searched.attempts > 0 and self._attempts < self._search_until:
            search.restart()
            return
        search.disarm()
        self._announce(search.parts, "done" if self._searched.attempts <= 0 else "given_up")
        self._search = None

    def _look_locally(self, suspects: Sequence[int], unscaled: Mapping[int, Sequence[Tensor]]) -> None:
        """Ranks skip together: whose gradients are not finite is looked at in the stream's next attempt."""
        if self._local is None:
            chosen = {*suspects[: MOST_LOCAL - 1], suspects[-1]}
            numbered = self._numbered(p for parameters in unscaled.values() for p in parameters)
            self._local = LocalGradients([each for each in numbered if each[0] in chosen])
            self._local_stream = self._stream
            self._local.arm()
            self._announce([self._local], "overflow_of_ranks")

    def _local_ended(self, looked: LocalGradients, stream: int) -> None:
        """Other streams' passes may add to these gradients too; they are cleared before they count."""
        if stream != self._local_stream:
            looked.restart()
            return
        looked.disarm()
        self._announce([looked], "done")
        self._local = None
        self._keep(looked.collect())

    def _look_again(self, index: int, parameters: Sequence[Tensor], origins: Origins) -> None:
        def is_known() -> bool:
            return not origins.known.isdisjoint(map(self._index, parameters))

        schedule = self._schedules.setdefault(index, Schedule())
        if not schedule.calls_after(clean=index in origins.clean, is_known=is_known):
            return
        numbered, looks = self._numbered(parameters), list[Observer]()
        if self._origin.get(index) not in self._armed:  # one that has seen nothing yet is waiting
            self._origin[index] = OriginProbe(numbered)
            looks.append(self._origin[index])
        if not self._has_order:
            self._has_order = True
            looks.append(BackwardOrder(numbered))
        self._arm(*looks, why="origin_due")

    def _arm(self, *observers: Observer, why: str) -> None:
        for observer in observers:
            observer.arm()
            self._armed.append(observer)
        self._announce(observers, why)

    def _announce(self, observers: Sequence[Observer], why: str) -> None:
        """Tell that these were put on or taken off."""
        if observers:
            hooks = sum(observer.hooks for observer in observers)
            self._announced.add([observer.event for observer in observers], hooks, why)

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
