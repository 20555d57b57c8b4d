"""The instrumented scaler: torch's own, bit for bit, and a record of what it met.

    scaler = ampwatch.GradScaler("cuda", model=model)   # instead of torch.amp.GradScaler("cuda")

Every method that is overridden hands its arguments to torch's unchanged and returns what torch returns. What is
recorded is read beside it (watching.py), and no reading synchronises with the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import internals
from .checks import WATCH
from .guard import guard
from .opening import given_of, source_of
from .recorder import current
from .registry import Sink
from .settings import Settings
from .succession import joined
from .unwatched import UNWATCHED, Span, Unwatched
from .watching import Watch

if TYPE_CHECKING:
    from .diagnosis.findings import Finding

__all__ = ["GradScaler", "watch"]

AnyScaler = TypeVar("AnyScaler", bound=torch.amp.GradScaler)

Answer = TypeVar("Answer")

_NOTHING: Final[Span] = nullcontext()


class _Seed:
    """What a copy of a scaler has in place of a watch, until its first use opens one of its own.

    A deep copy records into the same recorder. A pickled one carries nothing along: settings may hold a token, and
    the process that loads it has settings of its own.
    """

    def __init__(self, recorder: Sink | None = None) -> None:
        self._recorder = recorder

    def source(self) -> Sink:
        """Where the copy records."""
        return self._recorder or current()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Seed:
        return _Seed(self._recorder)

    def __reduce__(self) -> tuple[type[_Seed], tuple[()]]:
        return _Seed, ()


class Watched(torch.amp.GradScaler):
    """The overrides: each tells the watch, and calls torch."""

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        self._ask(lambda watch: watch.scaled(self, outputs, scaled), None, even_disabled=True)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        with self._ask(lambda watch: watch.unscaling(self, optimizer), _NOTHING):
            super().unscale_(optimizer)

    def _unscale_grads_(  # the default is that of ShardedGradScaler
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        torchs, factors = super()._unscale_grads_, (found_inf, inv_scale)
        found = self._ask(
            lambda watch: watch.gradients(self, optimizer, torchs, factors, fused=allow_fp16), None
        )
        return torchs(optimizer, inv_scale, found_inf, allow_fp16) if found is None else found

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        with self._ask(lambda watch: watch.stepping(self, optimizer, args, kwargs), _NOTHING):
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        with self._ask(lambda watch: watch.updating(self, new_scale), _NOTHING):
            super().update(new_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._ask(lambda watch: watch.restoring(self, state_dict), _NOTHING):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        watch = state.pop(WATCH, UNWATCHED)
        return state | {WATCH: _Seed(watch.recorder if isinstance(watch, Watch) else None)}

    def _ask(
        self, ask: Callable[[Unwatched], Answer], otherwise: Answer, *, even_disabled: bool = False
    ) -> Answer:
        """What the watch answers; `otherwise` where there is nothing to observe, or ours fails."""
        if internals.is_compiled() or not (self._enabled or even_disabled):
            return otherwise
        with guard("scaler.watch", self._report):
            return ask(self._watch())
        return otherwise

    def _report(self, where: str, error: Exception, count: int) -> None:
        watch = self.__dict__.get(WATCH)
        if isinstance(watch, Watch):
            watch.recorder.fault(where, error, count)

    def _watch(self) -> Unwatched:
        """The watch, or its stand-in where none records."""
        watch = self.__dict__.get(WATCH, UNWATCHED)
        if internals.is_captured():
            if isinstance(watch, Watch):
                watch.captured()
            return UNWATCHED
        if isinstance(watch, _Seed):
            watch = attach(self, None, watch.source)
        if isinstance(watch, Watch) and (other := joined(watch.recorder)) is not None:
            watch = attach(self, watch.model, lambda: other, watch.asked)
        if not isinstance(watch, Watch) or watch.recorder.finished:
            return UNWATCHED
        if watch.producer != watch.recorder.producer:  # a forked child is another producer
            same = watch.recorder
            return attach(self, watch.model, lambda: same, watch.asked)
        return watch


for _name in internals.RELIED_ON:  # by which Python calls a method in the text of a TypeError
    getattr(Watched, _name).__qualname__ = f"GradScaler.{_name}"


class GradScaler(Watched):
    """torch.amp.GradScaler that records every attempt: the same scale, skips, gradients and weights, bit for bit.

        scaler = ampwatch.GradScaler("cuda", model=model)

    Arguments:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: torch's own.
        model: names its parameters in the records, and lets a fault be traced to a module.
        run, project, server, dir, config, tags: where and as what the run is recorded (docs/settings.md); what is
            not given comes from `settings`, else from the environment.
        on_finding: called with each fatal finding, on the recorder's thread.
        settings: used as they are where nothing else is given, and instead of the environment.
        recorder: records here instead of the process's own recorder; the arguments from `run` on are then unused.
    Errors: torch's own; SettingsError for a setting that cannot be used.
    Synchronisation: none beyond torch's.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
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
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        given = given_of(run=run, project=project, server=server, dir=dir, config=config, tags=tags)
        attach(self, model, source_of(settings, given, on_finding, recorder, model), asked=enabled)


def watch(
    scaler: AnyScaler,
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
) -> AnyScaler:
    """Instrument a scaler that exists, in place: `watch(s) is s`, so whoever holds it has the watched one.

        ampwatch.watch(accelerator.scaler, model=model)

    Its class becomes one that mixes ours in; its state and what was patched onto the instance stay. A copy of it
    is a plain scaler of its first class. A scaler that is watched already is left as it is, but for `on_finding`,
    which is called too; after `finish()` it is watched anew.

    Arguments: as for `GradScaler`.
    Errors: SettingsError for a setting that cannot be used.
    Synchronisation: none.
    """
    watching = scaler.__dict__.get(WATCH)
    if isinstance(watching, _Seed):
        watching = attach(scaler, model, watching.source)
    if isinstance(watching, Watch) and not watching.recorder.finished:
        if on_finding is not None:
            watching.recorder.listen(on_finding)
        return scaler
    given = given_of(run=run, project=project, server=server, dir=dir, config=config, tags=tags)
    watching = attach(scaler, model, source_of(settings, given, on_finding, recorder, model))
    if isinstance(watching, Watch) and not isinstance(scaler, Watched):
        scaler.__dict__[WATCH] = UNWATCHED
        with guard("scaler.open", watching.recorder.fault, "the scaler is not watched"):
            scaler.__class__ = _watched_class(type(scaler))
            scaler.__dict__[WATCH] = watching
    return scaler


class _InPlace(Watched):
    """What `watch` mixes in: copies and pickles are of the class that the scaler had before."""

    def __init_subclass__(cls) -> None:
        """A class that is mixed is none that a user has written: his own is told of no subclass."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state[WATCH]
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (_torch_class(type(self)),), self.__getstate__()


def _watched_class(first: type[AnyScaler]) -> type[AnyScaler]:
    return type(first.__name__, (_InPlace, first), {"__module__": first.__module__})


def _torch_class(cls: type[torch.amp.GradScaler]) -> type[torch.amp.GradScaler]:
    """The class without what ampwatch has mixed in."""
    return next(b for b in cls.__mro__ if issubclass(b, internals.Scaler) and not issubclass(b, Watched))


def attach(
    scaler: torch.amp.GradScaler,
    model: nn.Module | None,
    source: Callable[[], Sink],
    asked: bool | None = None,
) -> Unwatched:
    """Give a scaler its watch, which is answered. A class that is not the one ampwatch was written for runs untouched."""
    watch, changed = UNWATCHED, list[str]()
    with guard("scaler.open"):
        recorder = source()
        with guard("scaler.open", recorder.fault):
            changed = internals.mismatches(_torch_class(type(scaler)))
            if not (changed or recorder.finished):
                watch = Watch(recorder, model, asked=asked)
        if changed:
            recorder.fault("scaler.open", TypeError(f"not the GradScaler that ampwatch knows: {changed}"), 1)
    scaler.__dict__[WATCH] = watch
    if changed:
        warnings.warn(
            f"{type(scaler).__name__} runs without ampwatch, which does not know {', '.join(changed)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return watch
