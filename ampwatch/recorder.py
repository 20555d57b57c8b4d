"""The recorder: what the training thread hands over, and the run that it belongs to.

The training thread appends to plain memory and returns; everything else (packing, disk, network, diagnosis)
happens on the thread of `worker.py`. No method here blocks, raises or synchronises with a device, but for
`finish`, which waits a bounded time.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from . import identity
from .guard import guard
from .logbook import Logbook
from .node import RANKS_THAT_SEND, Node, local_rank
from .settings import Settings
from .worker import Harvest, Source, Worker

if TYPE_CHECKING:
    import httpx

    from .diagnosis.findings import Finding

__all__ = ["Harvest", "Recorder", "Source", "current", "finish", "log"]


class Recorder:
    """Records one run in this process; a forked child that records goes on as another producer.

    Arguments:
        settings: what `Settings.load()` gives if None.
        on_finding: called once with each fatal finding, on the recorder's thread; its errors are swallowed.
        predecessor: a recorder of this process whose training may be over; until `settle` it is open which run this
            one belongs to, and what it is told waits (succession.py).
        clock: Unix time in seconds.
        http: transport of httpx in place of the network, for tests.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        on_finding: Callable[[Finding], object] | None = None,
        predecessor: Recorder | None = None,
        clock: Callable[[], float] = time.time,
        http: httpx.BaseTransport | None = None,
    ) -> None:
        self.settings = settings or Settings.load()
        self.rank, self._world_size = identity.rank_and_world()
        self.predecessor, self.follows = predecessor, False
        self.run = "" if predecessor else self._draw()
        self._listeners = [] if on_finding is None else [on_finding]
        self._clock, self._http = clock, http
        self._description: dict[str, Any] = {}
        self.logbook = Logbook()
        self.finished = not self.settings.enabled
        self._begin_producer()
        _alive.add(self)

    def _draw(self) -> str:
        """The run's id."""
        before = 0 if self.settings.run else next(_trainings)
        return identity.run_id(self.settings, self._world_size, trainings=before)

    def _begin_producer(self) -> None:
        self._pid = os.getpid()
        self.producer = identity.new_producer()
        self._attempts = itertools.count()
        self._sources: list[Source] = []
        self._held: list[Callable[[], None]] = []  # events, until it is known of which run
        self._lock = threading.RLock()  # a signal handler of the user's may call finish()
        self._worker: Worker | None = None

    def describe(self, **data: Any) -> None:
        """Add to the data of the `run` event (`device`, `statistics`, …); one that has gone out is sent again."""
        self._description |= data
        if self._worker is not None:
            self._worker.describe_again()

    def attach(self, source: Source) -> None:
        """Harvest this source at every flush from now on, until a harvest is its last."""
        self._sources.append(source)

    def event(self, type: str, *, attempt: int = -1, step: int = -1, stream: int = -1, **data: Any) -> None:
        """Record an event of docs/format.md. Any thread; `data` must be builtins."""
        with guard("recorder.event", self.fault):
            if not self.run:
                place = {"attempt": attempt, "step": step, "stream": stream}
                self._held.append(partial(self.event, type, **place, **data))
            elif worker := self._started():
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
        """Keep values for an attempt, see `log`; a later call adds to them or replaces them."""
        with guard("recorder.log", self.fault):
            given = {"step": step, "loss": loss, "batch_id": batch_id, "epoch": epoch} | scalars
            for name, value in given.items():
                if value is not None:
                    self.logbook.add(name, value)

    def listen(self, on_finding: Callable[[Finding], object]) -> None:
        """Call this too with each fatal finding."""
        if on_finding not in self._listeners:
            self._listeners.append(on_finding)

    def join(self, other: Recorder) -> None:
        """Leave everything to another recorder, which calls the same listeners."""
        for each in self._listeners:
            other.listen(each)

    def follow(self, predecessor: Recorder) -> None:
        """Take the place of a recorder whose training is over: it ends, and `log()` speaks to this one."""
        self.predecessor, self.follows = predecessor, True
        self.logbook = predecessor.logbook  # where what is said of the first attempt stands already
        predecessor._end()
        _current[None] = self

    def settle(self, run: str | None = None) -> None:
        """Belong to this run from now on, or to a new one, and record what was told so far."""
        if self.run:
            return
        self.run, self.predecessor, self.follows = run or self._draw(), None, True
        _current[None] = _current[self.run] = self
        held, self._held = self._held, []
        for event in held:
            event()

    def _end(self) -> None:
        """As `finish`, but the last flush and the verdict are waited for at the end of the process."""
        self.finished = True
        for run in [run for run, recorder in _current.items() if recorder is self]:
            del _current[run]
        _ending[:] = [recorder for recorder in _ending if recorder._is_writing] + [self]
        if self._worker is not None:
            self._worker.stop("finish")

    @property
    def _is_writing(self) -> bool:
        return self._worker is not None and self._worker.is_alive

    def finish(self, reason: str = "finish") -> None:
        """End the run's recording in this process and say the verdict; what comes later is not recorded.

        Waits for the last flush, the disk and the server, up to `worker.FINISH_S`. Safe to call again.
        """
        self._check_process()
        if self._held:
            self.settle()
        with self._lock:
            worker, self._worker = self._worker, None
            self.finished = True
        if worker is not None:
            worker.finish(reason)

    def _started(self) -> Worker | None:
        self._check_process()
        self.settle()
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
            node=self._join_node(),
            listeners=self._listeners,
            clock=self._clock,
            http=self._http,
        )
        worker.start()
        return worker

    def _join_node(self) -> Node | None:
        """The processes of this machine, in a job of so many that one of them should send for all."""
        place = local_rank()
        if self.settings.server is None or self._world_size <= RANKS_THAT_SEND or place is None:
            return None
        with guard("recorder.node", then="each process sends for itself"):
            folder = self.settings.dir / self.run / self.producer
            return Node(self.run, self.producer, folder, is_sender=place == 0)
        return None

    def _check_process(self) -> None:
        """A child that a library forked, without Python's hooks, records nothing: no thread can be started there."""
        if self._pid != os.getpid():
            self._forked()
            self.finished = True

    def _forked(self) -> None:
        """In a forked child: the parent's thread, its queue and its sources stay the parent's.

        A source's lock may be held for good here, by a thread that does not exist. The scalers attach new ones.
        """
        self._begin_producer()
        self.logbook = Logbook()
        if self.predecessor is not None:
            self.run, self.predecessor = self.predecessor.run, None


_trainings = itertools.count()
"""How many this process has recorded whose run nobody has named."""
_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()
_current: dict[str | None, Recorder] = {}
"""Recorders of this process that record, by the run they were asked for; None: whichever came last."""
_ending: list[Recorder] = []
"""Those whose place another has taken, as long as they write."""


def current(
    settings: Settings | None = None, *, on_finding: Callable[[Finding], object] | None = None
) -> Recorder:
    """The recorder of `settings.run` in this process, made where there is none that still records.

    Without a run in the settings it is the one that was made last: scalers of one process belong to one run, until
    a training is over (succession.py).
    """
    settings = settings or Settings.load()
    recorder = _current.get(settings.run)
    if recorder is None or recorder.finished:
        recorder = Recorder(settings, on_finding=on_finding)
        _current[None] = _current[recorder.run] = recorder
    elif on_finding is not None:
        recorder.listen(on_finding)
    return recorder


def newest() -> Recorder | None:
    """The recorder that was made last, while it records."""
    recorder = _current.get(None)
    return None if recorder is None or recorder.finished else recorder


def log(
    *,
    step: int | None = None,
    loss: float | None = None,
    batch_id: float | None = None,
    epoch: float | None = None,
    **scalars: float,
) -> None:
    """Add to the records what the scaler cannot see. Never needed.

        scaler.step(optimizer)
        scaler.update()
        ampwatch.log(step=step, loss=loss.item(), epoch=epoch, reward=reward)

    It may stand anywhere in the training loop. From the first `scale()` of an attempt to its `update()` it speaks of
    that attempt; after `update()` of the one just finished; at the top of the loop, before the first attempt of all, of
    the one that begins next, and so do the names that it gave there whenever they come between two attempts. What
    comes more than a second after `update()` (a validation, say) may find the row written, and stands in the next.
    Does nothing before the first scaler is made and after `finish`.

    Arguments:
        step: the user's own step number, from which findings and screens speak.
        loss: the loss, in the user's unit, where it is not what was passed to `scale()`.
        batch_id, epoch: numbers that name the batch and count the passes over the data.
        **scalars: further numbers by name (letters, digits and `_./ -`, at most 64 long).
            A number is one of Python or numpy, or a tensor or array of one element in host memory.

    Never raises, never synchronises: what is no number, or lies on a device, is left out with one warning a name.
    """
    if (recorder := newest()) is not None:
        recorder.log(step=step, loss=loss, batch_id=batch_id, epoch=epoch, **scalars)


def finish() -> None:
    """End the recording of every run of this process and say the verdicts; also done at interpreter exit."""
    _finish_all("finish")


def _finish_all(reason: str) -> None:
    for recorder in [*_ending, *_current.values()]:
        with guard("recorder.finish"):
            recorder.finish(reason)
    _ending.clear()
    _current.clear()


def _after_fork() -> None:
    for recorder in list(_alive):
        recorder._forked()


atexit.register(_finish_all, "exit")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
