"""The recorder: what the training thread hands over, and the run that it belongs to.

The training thread appends to plain memory and returns; everything else (packing, disk, network, diagnosis)
happens on the thread of `worker.py`. No method here blocks, raises or synchronises with a device, but for
`finish`, which waits a bounded time.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from . import identity
from .guard import guard
from .settings import Settings
from .worker import Harvest, Source, Worker

if TYPE_CHECKING:
    import httpx

    from .diagnosis.findings import Finding

__all__ = ["Harvest", "Recorder", "Source", "current", "finish", "log"]

MAX_LOGGED_NAMES: Final = 128
_log = logging.getLogger("ampwatch")


class Recorder:
    """Records one run in this process; a forked child that records goes on as another producer.

    Arguments:
        settings: what `Settings.load()` gives if None.
        on_finding: called once with each fatal finding, on the recorder's thread; its errors are swallowed.
        clock: Unix time in seconds.
        http: transport of httpx in place of the network, for tests.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        on_finding: Callable[[Finding], object] | None = None,
        clock: Callable[[], float] = time.time,
        http: httpx.BaseTransport | None = None,
    ) -> None:
        self.settings = settings or Settings.load()
        self.rank, self._world_size = identity.rank_and_world()
        self.run = identity.run_id(self.settings, self._world_size)
        self._listeners = [on_finding] if on_finding else []
        self._clock, self._http = clock, http
        self._inherited = False
        self._description: dict[str, Any] = {}
        self._logged: dict[str, float] = {}
        self._logged_names: set[str] = set()
        self._sources: list[Source] = []
        self.finished = not self.settings.enabled
        self._begin_producer()
        _alive.add(self)

    def _begin_producer(self) -> None:
        self.producer = identity.new_producer()
        self._attempts = itertools.count()
        self._lock = threading.RLock()  # a signal handler of the user's may call finish()
        self._worker: Worker | None = None

    def describe(self, **data: Any) -> None:
        """Add to the data of the `run` event (`device`, `statistics`, …); one that has gone out is sent again."""
        self._description |= data
        if self._worker is not None:
            self._worker.describe_again()

    def attach(self, source: Source) -> None:
        """Harvest this source at every flush from now on."""
        self._sources.append(source)

    def event(self, type: str, *, attempt: int = -1, step: int = -1, stream: int = -1, **data: Any) -> None:
        """Record an event of docs/format.md. Any thread; `data` must be builtins."""
        with guard("recorder.event", self.fault):
            if worker := self._started():
                worker.put(type, attempt=attempt, step=step, stream=stream, data=data)

    def fault(self, where: str, error: Exception, count: int) -> None:
        """Record that something of ours failed: a `guard.Report`."""
        self.event("fault", where=where, error=repr(error), count=count)

    def next_attempt(self) -> int:
        """Number of the attempt that begins now, from 0, over all scalers of this producer."""
        self._started()
        return next(self._attempts)

    def log(
        self,
        *,
        step: int | None = None,
        loss: float | None = None,
        batch_id: float | None = None,
        epoch: float | None = None,
        **scalars: float,
    ) -> None:
        """Keep values for the attempt that is under way; a later call adds to them or replaces them."""
        with guard("recorder.log", self.fault):
            given = {"step": step, "loss": loss, "batch_id": batch_id, "epoch": epoch} | scalars
            for name, value in given.items():
                if value is not None:
                    self._keep(name, value)

    def listen(self, on_finding: Callable[[Finding], object]) -> None:
        """Call this too with each fatal finding."""
        if on_finding not in self._listeners:
            self._listeners.append(on_finding)

    def take_logged(self) -> dict[str, float]:
        """What was logged since the last call, by name: reals, and `step` as an int."""
        logged, self._logged = self._logged, {}
        return logged

    def finish(self, reason: str = "finish") -> None:
        """End the run's recording in this process and say the verdict; what comes later is not recorded.

        Waits for the last flush, the disk and the server, up to `worker.FINISH_S`. Safe to call again.
        """
        with self._lock:
            worker, self._worker = self._worker, None
            self.finished = True
        if worker is not None:
            worker.finish(reason)

    def _started(self) -> Worker | None:
        if self._worker is None and not self.finished:
            with guard("recorder.start"), self._lock:
                if self._worker is None and not self.finished:
                    self._worker = self._start()
        return self._worker

    def _start(self) -> Worker:
        worker = Worker(
            self.settings,
            run=self.run,
            producer=self.producer,
            rank=self.rank,
            sources=self._sources,
            describe=lambda: identity.description(self.settings, self._world_size) | self._description,
            listeners=self._listeners,
            inherited=self._inherited,
            clock=self._clock,
            http=self._http,
        )
        worker.start()
        return worker

    def _keep(self, name: str, value: Any) -> None:
        if getattr(value, "device", None) is not None and getattr(value.device, "type", "cpu") != "cpu":
            _warn_once(
                f"log({name}=…): a tensor on a device is not recorded, as reading it would stop the device"
            )
            return
        name = re.sub(r"[^A-Za-z0-9_./ -]", "_", name)[:64] or "_"
        if name not in self._logged_names and len(self._logged_names) >= MAX_LOGGED_NAMES:
            _warn_once(f"log({name}=…): more than {MAX_LOGGED_NAMES} names are not recorded")
            return
        self._logged_names.add(name)
        self._logged[name] = int(value) if name == "step" else float(value)

    def _forked(self) -> None:
        """In a forked child: the parent's thread, its queue and its unharvested rows stay the parent's."""
        self._begin_producer()
        self._logged = {}
        self._inherited = True


_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()
_warned: set[str] = set()
_current: dict[str | None, Recorder] = {}
"""Recorders of this process that record, by the run they were asked for; None: whichever came last."""


def current(
    settings: Settings | None = None, *, on_finding: Callable[[Finding], object] | None = None
) -> Recorder:
    """The recorder of `settings.run` in this process, made where there is none that still records.

    Without a run in the settings it is the one that was made last: scalers of one process belong to one run.
    """
    settings = settings or Settings.load()
    recorder = _current.get(settings.run)
    if recorder is None or recorder.finished:
        recorder = Recorder(settings, on_finding=on_finding)
        _current[None] = _current[recorder.run] = recorder
    elif on_finding is not None:
        recorder.listen(on_finding)
    return recorder


def log(
    *,
    step: int | None = None,
    loss: float | None = None,
    batch_id: float | None = None,
    epoch: float | None = None,
    **scalars: float,
) -> None:
    """Add to the records what the scaler cannot see, for the attempt that is under way: before `scaler.update()`.

        ampwatch.log(step=step, loss=loss.item(), epoch=epoch, reward=reward)
        scaler.update()

    Never needed. After `update()` it speaks of the next attempt. Does nothing before the first scaler is made and after `finish`.

    Arguments:
        step: the user's own step number, from which findings and screens speak.
        loss: the loss, in the user's unit, where it is not what was passed to `scale()`.
        batch_id, epoch: numbers that name the batch and count the passes over the data.
        **scalars: further numbers by name (letters, digits and `_./ -`, at most 64 long).

    Never raises, never synchronises: a tensor on a device is left out with one warning.
    """
    recorder = _current.get(None)
    if recorder is not None and not recorder.finished:
        recorder.log(step=step, loss=loss, batch_id=batch_id, epoch=epoch, **scalars)


def finish() -> None:
    """End the recording of every run of this process and say the verdicts; also done at interpreter exit."""
    _finish_all("finish")


def _finish_all(reason: str) -> None:
    for recorder in list(_current.values()):
        recorder.finish(reason)
    _current.clear()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)


def _after_fork() -> None:
    for recorder in list(_alive):
        recorder._forked()


atexit.register(_finish_all, "exit")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
