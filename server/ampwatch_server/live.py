"""Live news: one look at the database a second for all who watch, whoever and however many they are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from anyio.to_thread import run_sync

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
SOONEST_S: Final = 0.1  # between two looks: passes that end together are told together
HEARTBEAT_S: Final = 15.0
SKEW_S: Final = (
    5.0  # how far the clocks of two servers may differ before news of one comes late through the other
)
_QUEUED: Final = 256  # a watcher who reads more slowly loses the oldest news; the next says the same and more

State = dict[str, Any]
News = tuple[list[tuple[int, State]], float]
"""States of runs, each with the revision of its run, and the moment of the last change among them."""


@dataclass(eq=False)
class Watcher:
    """Someone who watches a run, or every run (None). `queue` holds states, None at the end."""

    run: str | None
    queue: asyncio.Queue[State | None] = field(default_factory=lambda: asyncio.Queue(_QUEUED))

    def put(self, state: State | None) -> None:
        """Hand on a state; the oldest gives way where the watcher is too slow."""
        if self.queue.full():
            self.queue.get_nowait()
        self.queue.put_nowait(state)


class Hub:
    """Tells watchers which runs have changed.

    Arguments:
        changed_since: blocking; the runs that changed after a moment. Called about once a second while anyone
            watches, in a worker thread.
    """

    def __init__(self, changed_since: Callable[[float], News]) -> None:
        self._changed_since = changed_since
        self._watchers: set[Watcher] = set()
        self._told: dict[str, tuple[int, str]] = {}  # by run, the revision and the status
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._closed = False

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return len(self._watchers)

    def watched(self, run: str) -> bool:
        """Whether anyone watches this run now. Any thread."""
        return any(watcher.run in (None, run) for watcher in tuple(self._watchers))

    def all_watched(self) -> set[str]:
        """The runs that are watched now; empty for the list of all. Any thread."""
        return {watcher.run or "" for watcher in tuple(self._watchers)}

    def changed(self, _run: str) -> None:
        """A run has changed here: look soon. Any thread."""
        loop = self._loop
        if self._watchers and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """End every stream, so that a server that stops need not wait for them. Called in the event loop."""
        self._closed = True
        for watcher in self._watchers:
            watcher.put(None)

    async def states(self, run: str | None, now: Callable[[], News]) -> AsyncIterator[State | None]:
        """The states that `now` (blocking) answers, then those of a run, or of all, as they change; None as a heartbeat."""
        watcher = Watcher(run)
        self._watchers.add(watcher)  # before `now` looks: what changes meanwhile is told twice, not never
        try:
            states, since = await run_sync(now)
            self._start(since)
            for _, state in states:
                yield state
            while not self._closed:
                try:
                    following = await asyncio.wait_for(watcher.queue.get(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    yield None
                    continue
                if following is None:
                    return
                yield following
        finally:
            self._watchers.discard(watcher)

    def _start(self, since: float) -> None:
        if self._task is None or self._task.done():
            self._loop = asyncio.get_running_loop()
            self._told.clear()
            self._task = self._loop.create_task(self._poll(since))

    async def _poll(self, since: float) -> None:
        while self._watchers and not self._closed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), POLL_S)
            self._news.clear()
            since = await self._look(since)
            await asyncio.sleep(SOONEST_S)

    async def _look(self, since: float) -> float:
        try:
            changed, latest = await run_sync(self._changed_since, since - SKEW_S)
        except Exception:
            log.exception("the database could not be asked for news; asking again in a second")
            return since
        for revision, state in changed:
            key = (revision, state["status"])
            if self._told.get(state["run"]) != key:
                self._told[state["run"]] = key
                self._tell(state)
        return max(since, latest)

    def _tell(self, state: State) -> None:
        for watcher in self._watchers:
            if watcher.run in (None, state["run"]):
                watcher.put(state)


def is_news(state: Mapping[str, Any], cursor: Mapping[str, int]) -> bool:
    """Whether a state says more than one who has seen `cursor` (producer → seq) knows.

    A run that fell silent says so without a batch: it is told again rather than missed.
    """
    if state["status"] in ("stalled", "crashed"):
        return True
    return any(cursor.get(producer, -1) < seq for producer, seq in state["cursor"].items())
