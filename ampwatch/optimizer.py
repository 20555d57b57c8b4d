"""Training without a loss scaler, in bfloat16 or float32: the optimizer itself is watched.

    optimizer = ampwatch.watch_optimizer(torch.optim.AdamW(model.parameters()), model=model)

An attempt is a step of the optimizer. Its gradients are read as the step begins; where the step is given a closure,
as soon as that has been evaluated for the first time. They are read and never written, and no reading synchronises
with the device.
"""

# ruff: noqa: ARG002 - the watcher of one optimizer need not be told which

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import internals
from .dispatch import Dispatch, close_with
from .gradients import GradientList
from .guard import guard
from .hooks import Announcements
from .inspection import Inspection
from .losses import Losses, loss_in
from .names import Name, names_of
from .notices import warn
from .opening import given_of, source_of
from .outcome import Attempt, Unscaled
from .probes import Probes
from .registry import Sink, lrs_of, registry_of, step_of
from .ring import Memory
from .rounded_weights import RoundedWeights
from .settings import Settings
from .stats.choose import choose
from .succession import joined, settle
from .tripwires import Residue, Tripwires
from .unscaling import Pass

if TYPE_CHECKING:
    from .diagnosis.findings import Finding

__all__ = ["watch_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
StepArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

EMPTY: Final = 2  # steps in a row without any gradient before it is said: one may be a loop's way to begin


def watch_optimizer(
    optimizer: AnyOptimizer,
    *,
    model: nn.Module | None = None,
    run: str | None = None,
    project: str | None = None,
    server: str | None = None,
    dir: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    on_finding: Callable[[Finding], object] | None = None,
    settings: Settings | None = None,
    recorder: Sink | None = None,
) -> AnyOptimizer:
    """Record every step of an optimizer that no loss scaler steps: `watch_optimizer(o) is o`.

        optimizer = ampwatch.watch_optimizer(torch.optim.AdamW(model.parameters()), model=model)

    It trains to the same bits: hooks of the optimizer look at the gradients, and nothing of it is replaced. The loss
    is known where a closure answers it, where the model does (`output.loss`, as those of Transformers), or where the
    loop gives it to `ampwatch.log(loss=…)`. What clips gradients
    before the step has clipped those that are seen here. An optimizer that is watched already is left as it is, but
    for `on_finding`, which is called too; after `finish()` it is watched anew. One that a watched scaler steps is
    recorded by that.

    Arguments: as for `GradScaler`.
    Errors: SettingsError for a setting that cannot be used.
    Synchronisation: none.
    """
    watched = _innermost(optimizer)
    if watched is None:
        warn("%s has no hooks for its steps, and is not watched", type(optimizer).__name__)
        return optimizer
    given = given_of(run=run, project=project, server=server, dir=dir, config=config, tags=tags)
    source = source_of(settings, given, on_finding, recorder, watched)
    with guard("optimizer.open"):
        hooks = watched._optimizer_step_pre_hooks.values()
        before = next((hook for hook in hooks if isinstance(hook, _BeforeStep)), None)
        if before is not None and not before.recorder.finished:
            if on_finding is not None:
                before.recorder.listen(on_finding)
            return optimizer
        sink = source()
        with guard("optimizer.open", sink.fault):
            if sink.finished:
                return optimizer
            if before is None:
                watched.register_step_pre_hook(_BeforeStep(StepWatch(sink, model)))
            else:
                before.watch_anew(sink, model)
    return optimizer


class _BeforeStep:
    """The hook that keeps the watch alive; in a forked child, which is another producer, one of its own."""

    def __init__(self, watch: StepWatch) -> None:
        self._watch = watch

    @property
    def recorder(self) -> Sink:
        """Where its watch records."""
        return self._watch.recorder

    def watch_anew(self, sink: Sink, model: nn.Module | None) -> None:
        """Record there from now on."""
        self._watch = StepWatch(sink, model)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """None, or the step's arguments with its closure watched."""
        if internals.is_compiled():
            return None
        recorder = self._watch.recorder
        with guard("optimizer.before", recorder.fault):
            if internals.is_captured() or recorder.finished:
                return None
            if (other := joined(recorder)) is not None:
                recorder = other
                self.watch_anew(other, self._watch.model)
            if self._watch.producer != recorder.producer:
                self._watch = StepWatch(recorder, self._watch.model)
            return self._watch.before(optimizer, args, kwargs)


@dataclass
class _Step:
    """A step that is under way."""

    optimizer: Optimizer
    lrs: list[float | None]
    device: torch.device
    unscaled: Unscaled | None = None  # once the gradients have been read …
    rows: list[Tensor] = field(default_factory=list)  # … and their statistics


@dataclass
class _Window:
    """The backward passes since the step before, or since gradients were None after it."""

    residue: Residue = field(default_factory=Residue)
    accumulations: int = 0


class StepWatch:
    """Observes one optimizer. All methods belong to the training thread; none synchronises with the device.

    Arguments:
        recorder: takes the records.
        model: named in the records, and observed; None without.
        clock: Unix time in seconds.
        memory: host memory for the ring, see `Ring`.
    """

    def __init__(
        self,
        recorder: Sink,
        model: nn.Module | None = None,
        *,
        clock: Callable[[], float] = time.time,
        memory: Memory | None = None,
    ) -> None:
        self.recorder, self.model = recorder, model
        self.producer = recorder.producer
        self._clock = clock
        self._registry = registry_of(recorder)
        self._dispatch = Dispatch(recorder, self._registry, clock=clock, memory=memory)
        hooks = recorder.settings.observers
        self._announced = Announcements(self._dispatch.event)
        self._probes = Probes(model, self._registry.tensor, self._announced, hooks=hooks)
        self._tripwires = Tripwires(self, self._announced, hooks=hooks)
        self._inspection = Inspection(partial(self._dispatch.event, scaled=False), self._names_of_model)
        self._rounded = RoundedWeights(self._registry.tensor)
        self._gradients = GradientList(self._registry, self._names_of_model)
        self._names: dict[int, Name] | None = None
        self._pass: Pass | None = None
        self._scaler = -1  # index of what stands in a scaler's place, once the optimizer has stepped
        self._step: _Step | None = None
        self._empty = 0  # steps in a row without a gradient
        self._window = _Window()
        self._losses = Losses()  # of forward passes since the step before
        if model is not None:
            self._tripwires.on_forward(model, partial(_forwarded, weakref.ref(self)))
        close_with(self, recorder.fault, self._probes, self._tripwires, self._dispatch.harvester)

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """The optimizer is about to step.

        Arguments:
            args: of step(), the optimizer itself first.
        Returns: other arguments for it, or None.
        """
        settle(self.recorder, optimizer)
        if self._registry.owner_of(optimizer) is not None:  # a scaler's watch sees this step
            return None
        self._introduce(optimizer)
        self._step = step = _Step(optimizer, lrs_of(optimizer), _device_of(optimizer))
        self.recorder.logbook.begin()
        closure = next((arg for arg in args[1:2] if callable(arg)), kwargs.get("closure"))
        if closure is None:
            self._read(step, optimizer)
            return None
        watched = self._watched(step, optimizer, closure)
        return ((args[0], watched, *args[2:]), kwargs) if args[1:] else (args, kwargs | {"closure": watched})

    def forwarded(self, output: object) -> None:
        """The model has answered this; what comes of a closure that is evaluated again is left out."""
        loss = loss_in(output)
        if loss is not None and (self._step is None or self._step.unscaled is None):
            self._losses.add([loss], loss.device)

    def stepped(self, optimizer: int, itself: Optimizer) -> None:
        """The optimizer has stepped; of steps within one another the innermost counts."""
        step, self._step = self._step, None
        if step is None or step.unscaled is None:
            return
        try:
            self._send(step, step.unscaled)
        finally:
            self._window, self._losses = _Window(), Losses()

    def accumulating(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass is about to add to the gradient of this parameter."""
        self.recorder.logbook.begin()
        self._window = _Window() if parameter.grad is None else self._window
        self._window.residue.begin(parameter)

    def accumulated(self, optimizer: int, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of the optimizer's first parameter."""
        self._window.accumulations += 1
        self._probes.forward_ended()

    def _watched(
        self, step: _Step, optimizer: Optimizer, closure: Callable[..., object]
    ) -> Callable[..., object]:
        """The closure, and a look at what it has left the first time."""

        @wraps(closure, updated=())
        def evaluated(*args: Any, **kwargs: Any) -> object:
            loss = closure(*args, **kwargs)
            if step.unscaled is None:
                with guard("optimizer.closure", self.recorder.fault):
                    self._read(step, optimizer)
                    if not self._losses.is_known:
                        self._losses.add(internals.tensors_in(loss), step.device)
            return loss

        return evaluated

    def _read(self, step: _Step, optimizer: Optimizer) -> None:
        """Take the statistics of the gradients."""
        index = self._registry.optimizer(optimizer)
        gradients = self._gradients.of(optimizer, may_be_float16=True)
        self._look_for_none(index, optimizer, gradients.with_grad)
        if gradients.parameters:
            self._tripwires.on_accumulation(index, optimizer, gradients.parameters[0])
            self._probes.optimizer(index, gradients.parameters)
        if not self._window.accumulations:
            self._probes.forward_ended()
        if (seen := self._rounded.stepping(index, optimizer, self._registry.coming_attempt)) is not None:
            self._probes.note(seen)
        assert self._pass is not None
        step.rows = self._pass.read(gradients.by_device)
        step.unscaled = Unscaled(index, gradients.tensors, fused=False)

    def _look_for_none(self, index: int, optimizer: Optimizer, count: int) -> None:
        self._empty = 0 if count else self._empty + 1
        if self._empty in (0, EMPTY):
            self._inspection.gradients(index, optimizer, count, loss_has_graph=None)

    def _send(self, step: _Step, unscaled: Unscaled) -> None:
        self._announced.tell()
        count = step_of(step.optimizer)
        attempt = self._attempt(step, unscaled, is_counted=count is not None)
        # Ahead of the attempt, so that its row already speaks of the origin of its gradients.
        self._dispatch.seen(self._probes.collect(attempt.stream), step.device, attempt.attempt)
        self._dispatch.attempt(attempt, self._numbers_of(step, count), step.rows, step.device)
        harvester = self._dispatch.harvester
        seen = self._probes.follow(harvester.escalation, harvester.origins)
        self._dispatch.seen(seen, step.device, attempt.attempt)
        self._announced.tell()

    def _numbers_of(self, step: _Step, count: Tensor | None) -> list[Tensor]:
        """In the order of `Attempt`, without the statistics: a scale of 1 that stays 1, and nothing skipped."""
        one, zero = (make((), dtype=torch.float64, device=step.device) for make in (torch.ones, torch.zeros))
        loss = self._losses.mean()
        left = [] if self._window.residue.found is None else [self._window.residue.found]
        counted = [] if count is None else [count]
        return [one, one, zero, zero if loss is None else loss, zero, *left, *counted]

    def _attempt(self, step: _Step, unscaled: Unscaled, *, is_counted: bool) -> Attempt:
        number = self.recorder.next_attempt()
        self._registry.coming_attempt = number + 1
        index = unscaled.optimizer
        return Attempt(
            attempt=number,
            stream=self._dispatch.stream,
            scaler=self._scaler,
            time=self._clock(),
            order=[f"step:{index}"],
            losses=int(self._losses.is_known),
            has_loss=self._losses.is_known,
            stepped=[index],
            found=[index],
            unscaled=[unscaled],
            manual=False,
            residues=[index] if self._window.residue.found is not None else [],
            micro_batches=self._window.accumulations or -1,
            updates=self._dispatch.since_last(),
            counted=[index] if is_counted else [],
            lr=step.lrs[0] if step.lrs else None,
            lrs={index: step.lrs},
            scaled=False,
            logged=self.recorder.logbook.end(),
        )

    def _introduce(self, optimizer: Optimizer) -> None:
        """At its first step events tell what it is, and that no scaler stands beside it."""
        index = self._registry.optimizer(optimizer)
        if self._scaler < 0:
            device = _device_of(optimizer).type
            self._pass = Pass(choose(self.recorder.settings.statistics, device), self.recorder)
            self._scaler = self._registry.new_scaler(optimizer)
            self._dispatch.stream = self._registry.stream(self._scaler, [index])
            self.recorder.describe(device=internals.name_of(device), statistics=self._pass.name)
            self._dispatch.event("scaler", scaler=self._scaler, **internals.describe_none(device))
            self._inspection.meet(index, optimizer, ())
            self._tripwires.on_step(index, optimizer)
        self._inspection.step(index, optimizer)

    def _names_of_model(self) -> dict[int, Name]:
        """Looked up when the first gradients are there: by then every lazy parameter is."""
        if self._names is None:
            self._names = names_of(self.model)
        return self._names


def _innermost(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer in a wrapper that has no hooks of its own, as Accelerate's; None where there is none with hooks."""
    inner: Any = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks"):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            return None
    return inner  # type: ignore[no-any-return]


def _forwarded(watch: weakref.ref[StepWatch], *seen: object) -> None:
    alive = watch()
    if alive is not None:
        alive.forwarded(seen[-1])


def _device_of(optimizer: Optimizer) -> torch.device:
    """Of the first parameter."""
    parameters: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    first = next(iter(parameters), None)
    return torch.device("cpu") if first is None else first.device
