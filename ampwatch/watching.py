"""What a watched scaler does beside torch's: look, send, and never touch.

A `Watch` belongs to one scaler, which tells it of every call before torch sees it and after. On the device it only
reads, and what it reads goes into the ring at `update()`, in one copy. Every entry point runs under the guard:
where ours fails, the scaler is torch's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import coalescing, internals
from .by_hand import ByHand
from .checks import wants_closure
from .dispatch import Dispatch, close_with
from .ephemerons import Ephemerons
from .fused_step import FusedSteps
from .gradients import GradientList, Gradients
from .guard import guard
from .hooks import Announcements
from .inspection import Inspection
from .internals import Factors, Replicas, Scaler, UnscaleGrads
from .measures import Measures, OptimizerGradients
from .names import Models, Name, names_of
from .outcome import Attempt, Unscaled
from .probes import Probes
from .protocol import Call, CallFault, Protocol
from .registry import Sink, dtype_name, registry_of
from .ring import Memory
from .rounded_weights import RoundedWeights
from .scaled_passes import ScaledPasses
from .stats.choose import REFERENCE, Statistics, choose
from .strangers import Look, Strangers
from .succession import settle
from .tripwires import Tripwires
from .unscaled_passes import UnscaledPasses
from .unscaled_steps import UnscaledSteps
from .unscaling import Pass
from .unwatched import Around, Span, Unwatched


@dataclass
class _Update:
    """What has to be read before update() forgets it."""

    call: Call
    scale: Tensor | None  # None before the first scale()
    found_inf: dict[int, Tensor]
    order: list[str]
    losses: int
    stepped: list[int]
    manual: bool


class Watch(Unwatched):
    """Observes one scaler. All methods belong to the training thread; none synchronises with the device.

    Arguments:
        recorder: takes the records.
        model: named in the records, and observed; None without.
        clock: Unix time in seconds.
        memory: host memory for the ring, see `Ring`.
        asked: whether the user wanted the scaler enabled; None where that is not known.
    """

    def __init__(
        self,
        recorder: Sink,
        model: nn.Module | None = None,
        *,
        clock: Callable[[], float] = time.time,
        memory: Memory | None = None,
        asked: bool | None = None,
    ) -> None:
        self.recorder, self._models = recorder, Models(model)
        self.producer = recorder.producer
        self._clock, self.asked = clock, asked
        self._pass: Pass | None = None
        self._registry = registry_of(recorder)
        self._dispatch = Dispatch(recorder, self._registry, clock=clock, memory=memory)
        self._harvester = self._dispatch.harvester
        self._protocol = Protocol()
        hooks = recorder.settings.observers
        self._announced = Announcements(self._dispatch.event)
        self._probes = Probes(model, self._registry.tensor, self._announced, hooks=hooks)
        self._tripwires = Tripwires(self, self._announced, hooks=hooks)
        self._strangers = Strangers(self, self._announced)
        self._passes = ScaledPasses()
        self._unscaled_passes = UnscaledPasses()
        self._by_hand = ByHand()
        self._unscaled_steps = UnscaledSteps(self._protocol)
        self._inspection = Inspection(self._dispatch.event, self._names_of_model)
        self._names: dict[int, Name] | None = None
        self._lists = Ephemerons[Optimizer, GradientList]()
        self._listed: weakref.WeakValueDictionary[int, GradientList] = weakref.WeakValueDictionary()
        self._dtypes: set[torch.dtype] = set()
        self._scaler = -1  # index, once there is one
        self._is_restored = False
        self._is_given_state = False  # since the last loss was scaled
        self._left: list[int] = []  # versions of weights, as the last update left them
        self._stepping: int | None = None
        self._fused = FusedSteps()
        self._rounded = RoundedWeights(self._registry.tensor)
        self._is_captured = False
        self._measured = Measures()
        close_with(
            self,
            recorder.fault,
            self._probes,
            self._tripwires,
            self._strangers,
            self._unscaled_steps,
            self._models,
            self._harvester,
        )

    @property
    def model(self) -> nn.Module | None:
        """Named in the records, and observed; None without, or where it is no more."""
        return self._models.model()

    def scaled(self, scaler: Scaler, outputs: object, scaled: object) -> None:
        """`scale()` has made the one of the other."""
        with guard("scaler.scale", self.recorder.fault):
            losses, is_known = internals.tensors_in(outputs), not internals.is_lazy(outputs)
            self._note_losses(scaler, losses)
            if scaler.is_enabled() and self.recorder.settings.observers:
                for each in (self._passes, self._strangers):
                    each.scaled(internals.tensors_in(scaled), is_known=is_known)

    def unscaling(self, scaler: Scaler, optimizer: Optimizer) -> Span:
        """Around an explicit `unscale_()`; the one that torch's `step()` calls is no call of the user's."""
        if self._stepping is not None:
            return nullcontext()
        announce = partial(self._announce_unscale, scaler, optimizer)
        return self._around("unscale_", announce, self._close_unscale)

    def stepping(
        self, scaler: Scaler, optimizer: Optimizer, args: Sequence[object], kwargs: dict[str, Any]
    ) -> Span:
        """Around `step()`."""
        closure = "closure" in kwargs or any(callable(arg) for arg in args[:1])
        announce = partial(self._announce_step, scaler, optimizer, closure)
        return self._around("step", announce, partial(self._close_step, scaler, optimizer))

    def gradients(
        self, scaler: Scaler, optimizer: Optimizer, torchs: UnscaleGrads, factors: Factors, *, fused: bool
    ) -> dict[torch.device, Tensor] | None:
        """These gradients are about to be checked, and multiplied by 1/S unless `fused`.

        Arguments:
            torchs: the method that does it. Where that is torch's own, it is done here, in the pass that takes the
                statistics.
            factors: its found_inf and inverse scale.
        Returns: what the method would have; None if it is still to be called.
        """
        replicas = left = None
        with guard("scaler.gradients", self.recorder.fault):
            if not internals.is_used(scaler):  # no loss was scaled: somebody calls the method by itself
                return None
            replicas = internals.replicas_for(scaler, torchs, factors)
            left = self._take_gradients(scaler, optimizer, fused, replicas)
        if left is None or replicas is None or self._pass is None:
            return None
        index, gradients = left
        flags = replicas.found_inf()
        noted = self._measured.gradients.pop(index)  # until it has its rows
        is_done = False
        # From here on gradients change: whatever fails, torch's method must not do it again.
        with guard("scaler.gradients", self.recorder.fault):
            is_done, rows = self._pass.unscale(gradients.by_device, replicas)
            if rows is not None:
                noted.rows = rows
                self._measured.gradients[index] = noted
        return flags if is_done else None

    def updating(self, scaler: Scaler, new_scale: object) -> Span:
        """Around `update()`."""
        before = partial(self._before_update, scaler, new_scale is not None)
        return self._around("update", before, partial(self._after_update, scaler))

    def restoring(self, scaler: Scaler, state: dict[str, Any]) -> Span:
        """Around `load_state_dict()`."""
        return self._around(
            "load_state_dict", partial(self._known_scale, scaler), partial(self._restored, state)
        )

    def accumulating(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass is about to add to the gradient of this parameter."""
        self._passes.accumulating(optimizer, parameter)
        if self._passes.adds_unscaled:
            self._unscaled_passes.accumulating(optimizer, parameter)
        self._measured.accumulating(optimizer, parameter)

    def accumulated(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of an optimizer's first parameter."""
        self._passes.accumulated(optimizer, parameter)
        self._unscaled_passes.accumulated(optimizer, parameter)
        if optimizer in self._harvester.origins.clean:
            self._by_hand.accumulated(optimizer, parameter)
        self._protocol.accumulated(optimizer)
        listed = self._listed.get(optimizer)
        more = listed.some() if listed is not None else ()
        self._measured.accumulated(optimizer, parameter, more)

    def stepped(self, optimizer: int, itself: Optimizer) -> None:
        """An optimizer has stepped, inside `scaler.step()` or not."""
        if self._stepping == optimizer:
            return
        self._passes.stepped_outside(optimizer)
        self._tell(self._protocol.step_outside(optimizer))
        if self._protocol.is_fed_unscaled(optimizer):
            numbered = (
                (self._registry.tensor(p), p) for group in itself.param_groups for p in group["params"]
            )
            seen = self._unscaled_steps.stepped(optimizer, numbered, self._harvester.origins.float16)
            if seen is not None:
                self._probes.note(seen)

    def is_ours(self, optimizer: Optimizer) -> bool:
        """Whether a scaler of the run steps this optimizer, or is stepping what it is a part of; or the run is over."""
        known = self._stepping is not None or self._registry.owner_of(optimizer) is not None
        return known or self.recorder.finished

    def unscales(self, parameter: Tensor) -> bool:
        """Whether an optimizer that the scaler has unscaled holds this parameter."""
        return any(parameter is p for o in self._lists for group in o.param_groups for p in group["params"])

    def stepped_by_itself(self, optimizer: Optimizer) -> None:
        """An optimizer that the scaler never steps has stepped with gradients of a scaled loss."""
        self._tell(self._protocol.step_outside(self._registry.optimizer(optimizer), is_scaled=True))

    def stepped_unscaled(self, optimizer: Optimizer, seen: Sequence[Look]) -> None:
        """One has stepped with gradients of a loss that was not scaled."""
        self._probes.note(self._unscaled_steps.stranger(optimizer, seen))

    def captured(self) -> None:
        """The scaler is called while a graph is captured: what replays it is not seen. Told once."""
        if not self._is_captured:
            self._is_captured = True
            with guard("scaler.captured", self.recorder.fault):
                self._dispatch.event("captured")

    def _around(self, where: str, before: Callable[[], Any], after: Callable[[Any, bool], None]) -> Span:
        return Around(f"scaler.{where}", self.recorder.fault, before, after)

    def _note_losses(self, scaler: Scaler, losses: Sequence[Tensor]) -> None:
        for loss in losses:
            self._note_dtype(loss.dtype)
            has_graph = bool(self._measured.loss_has_graph) or loss.grad_fn is not None
            self._measured.loss_has_graph = has_graph
        if not scaler.is_enabled():
            self._note_disabled(scaler, losses)
            return
        self.recorder.logbook.begin()
        if self._is_given_state:
            self._is_given_state = False
            if self._left and self._left == self._versions():
                self._dispatch.event("went_on")
        moved = self._models.has_moved() if self._protocol.only_scales else None
        self._tell(self._protocol.scale(moved=moved, used=self._passes.are_used))
        self._probes.forward_ended(losses)
        if losses:
            self._measured.losses.add(losses, internals.scale_of(scaler).device)

    def _note_disabled(self, scaler: Scaler, losses: Sequence[Tensor]) -> None:
        """A disabled scaler does nothing after this: say so, and which autocast it stands beside."""
        self._introduce(scaler)
        if losses:
            self._dispatch.seen(self._probes.collect(), losses[0].device, -1)
            self._harvester.advance()

    def _note_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self._dtypes:
            self._dtypes.add(dtype)
            self._dispatch.event("loss_dtype", dtype=dtype_name(dtype))

    def _announce_unscale(self, scaler: Scaler, optimizer: Optimizer) -> Call:
        return self._protocol.unscale(self._seen(scaler, optimizer))

    def _announce_step(self, scaler: Scaler, optimizer: Optimizer, closure: bool) -> Call:
        self._stepping = index = self._seen(scaler, optimizer)
        self._inspection.step(index, optimizer)
        # Those that are not unscaled yet are looked at as torch's step() unscales them.
        if index in self._measured.gradients:
            self._inspect_gradients(index, optimizer)
        is_unscaled = index in self._measured.gradients
        if is_unscaled:
            self._by_hand.taken(index, internals.scale_of(scaler))
        self._fused.begin(optimizer, index, partial(internals.scale_of, scaler), is_unscaled=is_unscaled)
        if (seen := self._rounded.stepping(index, optimizer, self._registry.coming_attempt)) is not None:
            self._probes.note(seen)
        self._measured.stepping(index, optimizer)
        return self._protocol.step(index, closure=closure, wanted=wants_closure(optimizer))

    def _close(self, call: Call | None, raised: bool) -> None:
        if call is not None:
            self._tell(self._protocol.close(call, raised=raised))

    def _close_unscale(self, call: Call | None, raised: bool) -> None:
        self._close(call, raised)
        if call is not None and call.optimizer is not None and not raised:
            self._by_hand.left(call.optimizer)

    def _close_step(self, scaler: Scaler, optimizer: Optimizer, call: Call | None, raised: bool) -> None:
        index, self._stepping = self._stepping, None
        looked = self._fused.ended()
        if looked is not None and not raised:
            self._probes.note(looked.ended(self._found_inf(scaler).get(looked.index)))
        self._close(call, raised)
        if index is not None:
            self._measured.stepped(index, optimizer)
            if (seen := self._by_hand.ended(index, self._protocol.window.order)) is not None:
                self._probes.note(seen)

    def _seen(self, scaler: Scaler, optimizer: Optimizer) -> int:
        """Index of the optimizer. When this scaler sees it first, both are introduced, and its steps are watched."""
        settle(self.recorder, optimizer, is_restored=self._is_restored)
        index = self._registry.optimizer(optimizer)
        if not self._tripwires.knows(index):
            if self._scaler < 0 and (steps := self._registry.steps(optimizer)) is not None:
                self._harvester.follow(steps)
            self._introduce(scaler, replaces=self._registry.owner(optimizer))
            self._registry.own(optimizer, self._scaler, self._harvester.steps)
            self._models.meet(optimizer)
            if self._models.has_waiting(optimizer):
                self._protocol.waits(index)
            self._inspection.meet(index, optimizer, self._measured.gradients)
            self._tripwires.on_step(index, optimizer)
        return index

    def _take_gradients(
        self, scaler: Scaler, optimizer: Optimizer, fused: bool, torchs: Replicas | None
    ) -> tuple[int, Gradients] | None:
        """Note the gradients. Answers those that are left to be unscaled, with their statistics, as the last thing.

        Arguments:
            torchs: what torch's own method would do; None where another is called.
        """
        index = self._seen(scaler, optimizer)
        assert self._pass is not None  # since it was seen
        if index in self._measured.gradients:
            return None
        scale, order = internals.scale_of(scaler), self._protocol.window.order
        self._by_hand.taken(index, scale)
        if (seen := self._unscaled_passes.taken(index, scale, order)) is not None:
            self._probes.note(seen)
        if self._passes.unscaled(index):
            self._tell(self._protocol.unscaled_backward(index))
        if optimizer not in self._lists:
            # It hangs on the optimizer, and keeps no watch alive.
            names = partial(_names_known_to, weakref.ref(self))
            self._lists[optimizer] = GradientList(self._registry, names)
            self._listed[index] = self._lists[optimizer]
        gradients = self._lists[optimizer].of(optimizer, may_be_float16=fused, torchs=torchs)
        if gradients.parameters:
            self._tripwires.on_accumulation(index, optimizer, gradients.parameters[0])
            self._probes.optimizer(index, gradients.parameters)
        if gradients.sums:
            self._probes.note(coalescing.overflow(gradients.sums, self._registry.tensor))
        ours = torchs is not None and gradients.usual and self._pass.unscales and gradients.with_grad > 0
        rows = [] if ours else self._pass.read(gradients.by_device)
        unscaled = Unscaled(index, gradients.tensors, fused)
        self._measured.gradients[index] = OptimizerGradients(unscaled, rows, gradients.with_grad)
        if self._stepping == index:
            self._inspect_gradients(index, optimizer)
        return (index, gradients) if ours else None

    def _inspect_gradients(self, index: int, optimizer: Optimizer) -> None:
        count = self._measured.gradients[index].with_grad
        self._inspection.gradients(index, optimizer, count, loss_has_graph=self._measured.loss_has_graph)

    def _before_update(self, scaler: Scaler, manual: bool) -> _Update:
        call = self._protocol.update(manual=manual)
        window = self._protocol.window
        scale, found_inf = None, {}
        if internals.is_used(scaler):
            scale = internals.scale_of(scaler).clone()
            found_inf = self._found_inf(scaler)
        return _Update(call, scale, found_inf, window.order, window.losses, window.stepped, manual)

    def _found_inf(self, scaler: Scaler) -> dict[int, Tensor]:
        flags = internals.found_inf_of(scaler)
        known = {self._tripwires.index_of(key): flag.clone() for key, flag in flags.items()}
        return {index: known[index] for index in sorted(i for i in known if i is not None)}

    def _after_update(self, scaler: Scaler, noted: _Update | None, raised: bool) -> None:
        self._close(noted.call if noted else None, raised)
        if raised:
            return
        try:
            if noted is not None:
                self._send(scaler, noted)
        finally:
            self._measured = Measures()
            self._models.updated()
            self._passes.updated()
            self._unscaled_passes.updated()
            self._by_hand.updated()
            self._unscaled_steps.updated()
            self._left = self._versions()

    def _send(self, scaler: Scaler, noted: _Update) -> None:
        self._announced.tell()
        attempt = self._attempt(scaler, noted)
        after, tracker = internals.scale_of(scaler), internals.tracker_of(scaler)
        device = after.device
        # Ahead of the attempt, so that its row already speaks of the origin of its gradients.
        self._dispatch.seen(self._probes.collect(attempt.stream), device, attempt.attempt)
        assert noted.scale is not None  # update() raises before the first scale()
        numbers = self._measured.numbers(noted.scale, after, tracker, noted.found_inf)
        self._dispatch.attempt(attempt, numbers, self._measured.rows(), device)
        if (fell := self._harvester.escalation.take_fall()) is not None:
            self._by_hand.fell(fell)
        seen = self._probes.follow(self._harvester.escalation, self._harvester.origins)
        self._dispatch.seen(seen, device, attempt.attempt)
        self._announced.tell()

    def _attempt(self, scaler: Scaler, noted: _Update) -> Attempt:
        number = self.recorder.next_attempt()
        self._registry.coming_attempt = number + 1
        measured, found = self._measured, list(noted.found_inf)
        # A manual update between two attempts belongs to the stream before it.
        if found or self._dispatch.stream < 0:
            self._dispatch.stream = self._registry.stream(self._introduce(scaler), found)
        return Attempt(
            attempt=number,
            stream=self._dispatch.stream,
            scaler=self._scaler,
            time=self._clock(),
            order=noted.order,
            losses=noted.losses,
            has_loss=measured.losses.is_known,
            stepped=noted.stepped,
            found=found,
            unscaled=[gradients.unscaled for gradients in measured.gradients.values()],
            manual=noted.manual,
            residues=[i for i in found if measured.left_in(i) is not None],
            raw=[i for i in found if measured.raw_in(i) is not None],
            micro_batches=measured.micro_batches_of(found),
            updates=self._dispatch.since_last(),
            counted=list(measured.counts),
            lr=measured.first_lr(),
            lrs=measured.lrs,
            logged=self.recorder.logbook.end(),
        )

    def _versions(self) -> list[int]:
        """By which it is known whether some weights of each optimizer were written to."""
        return [p._version for listed in self._lists.values() for p in listed.some()]

    def _known_scale(self, scaler: Scaler) -> float:
        """The scale as far as the host knows it."""
        self._harvester.advance()
        known = self._harvester.scale
        return internals.init_scale_of(scaler) if known is None else known

    def _restored(self, state: dict[str, Any], before: float | None, raised: bool) -> None:
        if before is not None and not raised:
            self._is_restored = self._is_given_state = True
            self._harvester.scale = float(state["scale"])
            self._dispatch.event(
                "restored",
                scale=before,
                scale_after=self._harvester.scale,
                growth_tracker=state.get("_growth_tracker"),
            )

    def _introduce(self, scaler: Scaler, replaces: int | None = None) -> int:
        """Index of the scaler; at its first use an event tells what it is, and whose place it takes."""
        if self._scaler < 0:
            self._pass = Pass(self._statistics_for(scaler), self.recorder)
            self._scaler = self._registry.new_scaler(scaler)
            self.recorder.describe(device=internals.device_name(scaler), statistics=self._pass.name)
            self._dispatch.event(
                "scaler",
                scaler=self._scaler,
                asked=self.asked,
                **internals.describe(scaler),
                replaces=replaces,
            )
        return self._scaler

    def _statistics_for(self, scaler: Scaler) -> Statistics:
        """Now that the device is at work; a disabled scaler has no gradients that they would be taken of."""
        wanted = self.recorder.settings.statistics if scaler.is_enabled() else REFERENCE
        return choose(wanted, internals.device_type(scaler))

    def _names_of_model(self) -> dict[int, Name]:
        """Looked up when the first gradients are there: by then every lazy parameter is."""
        if self._names is None:
            self._names = names_of(self.model)
        return self._names

    def _tell(self, faults: Iterable[CallFault]) -> None:
        for fault in faults:
            self._dispatch.event("call_fault", **asdict(fault))


def _names_known_to(watch: weakref.ref[Watch]) -> dict[int, Name]:
    alive = watch()
    return {} if alive is None else alive._names_of_model()
