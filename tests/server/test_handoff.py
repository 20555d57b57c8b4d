from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from ampwatch_server.handoff import Handoff

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own, in a thread of its own: that of the tests may have one already, of a browser's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def resolve(futures: list[Future[int]]) -> None:
    for number, future in enumerate(futures):
        future.set_exception(ValueError("odd")) if number % 2 else future.set_result(number)


def test_each_gets_its_own_result_or_error() -> None:
    futures: list[Future[int]] = [Future() for _ in range(4)]

    async def wait() -> list[int | Exception]:
        waiting = asyncio.ensure_future(Handoff().wait(futures))
        await asyncio.sleep(0)
        threading.Thread(target=resolve, args=(futures,)).start()
        return await waiting

    got = run(wait())
    assert [str(each) for each in got] == ["0", "odd", "2", "odd"]


def test_who_leaves_disturbs_nobody() -> None:
    futures: list[Future[int]] = [Future(), Future()]

    async def wait() -> list[int | Exception]:
        handoff = Handoff()
        leaves, stays = (asyncio.ensure_future(handoff.wait([future])) for future in futures)
        await asyncio.sleep(0)
        leaves.cancel()
        for number, future in enumerate(futures):
            future.set_result(number)
        with pytest.raises(asyncio.CancelledError):
            await leaves
        return await stays

    assert run(wait()) == [1]
