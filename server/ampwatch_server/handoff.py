"""From the writing thread to an event loop, many results at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Handoff:
    """Lets one event loop wait for what other threads tell. What they tell together wakes the loop once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: list[tuple[asyncio.Future[Any], Any]] = []  # not delivered yet

    async def wait(self, begin: Callable[[Callable[[T], None]], object]) -> T:
        """What another thread tells, once.

        Arguments:
            begin: called at once, with the function by which to tell. It may raise instead of seeing to that.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()
        begin(lambda told: self._pass_on(loop, waiting, told))
        return await waiting

    def _pass_on(self, loop: asyncio.AbstractEventLoop, waiting: asyncio.Future[T], told: T) -> None:
        with self._lock:
            self._told.append((waiting, told))
            is_first = len(self._told) == 1
        if is_first and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            delivered, self._told = self._told, []
        for waiting, told in delivered:
            if not waiting.done():  # whoever waited may have left
                waiting.set_result(told)
