from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from ampwatch_server.handoff import Handoff

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own, in a thread of its own: that of the tests may have one already, of a browser's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def test_each_is_told_its_own() -> None:
    async def wait() -> list[str]:
        handoff, tellers = Handoff(), queue.SimpleQueue[Callable[[str], None]]()
        waiting = [asyncio.ensure_future(handoff.wait(tellers.put)) for _ in range(3)]
        await asyncio.sleep(0)
        tell = [tellers.get() for _ in waiting]
        threading.Thread(target=lambda: [tell[i](str(i)) for i in (2, 0, 1)]).start()
        return await asyncio.gather(*waiting)

    assert run(wait()) == ["0", "1", "2"]


def test_who_leaves_disturbs_nobody() -> None:
    async def wait() -> str:
        handoff, tellers = Handoff(), queue.SimpleQueue[Callable[[str], None]]()
        leaves, stays = (asyncio.ensure_future(handoff.wait(tellers.put)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        tellers.get()("left")
        tellers.get()("stayed")
        with pytest.raises(asyncio.CancelledError):
            await leaves
        return await stays

    assert run(wait()) == "stayed"


def test_what_cannot_begin_is_not_waited_for() -> None:
    def begin(_: Callable[[str], None]) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        run(Handoff().wait(begin))
