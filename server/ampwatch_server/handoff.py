"""From the writing thread to an event loop, many results at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Handoff:
    """Lets one event loop wait for futures of other threads.

    `asyncio.wrap_future` wakes the loop for each future. Those that share a commit resolve together, and here wake
    it once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: list[tuple[asyncio.Future[Any], Future[Any]]] = []  # not delivered yet

    async def wait(self, futures: Sequence[Future[T]]) -> list[T | Exception]:
        """The results of futures, or their errors, in their order. Who stops waiting does not cancel them."""
        waiting = [self._awaited(future) for future in futures]
        outcomes: list[T | Exception] = []
        try:
            for each in waiting:
                try:
                    outcomes.append(await each)
                except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
                    outcomes.append(error)
        finally:
            for each in waiting:  # those that nobody waits for any more
                each.cancel()
        return outcomes

    def _awaited(self, future: Future[T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: self._pass_on(loop, waiting, done))
        return waiting

    def _pass_on(
        self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[Any], done: Future[Any]
    ) -> None:
        with self._lock:
            self._done.append((waiting, done))
            is_first = len(self._done) == 1
        if is_first and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            delivered, self._done = self._done, []
        for waiting, done in delivered:
            if waiting.done():  # whoever waited has left
                continue
            if (error := done.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(done.result())
