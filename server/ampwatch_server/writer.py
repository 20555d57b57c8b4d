"""The one thread that writes: jobs from a queue, each in a transaction of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ampwatch.errors import AmpwatchError

T = TypeVar("T")

_READ_ONLY: Final = "25006"  # of PostgreSQL: the server was made a standby


class Unavailable(AmpwatchError):
    """The database cannot be used now: it is locked, full, or gone. The same may be tried again later."""


@contextmanager
def told_when_unavailable() -> Iterator[None]:
    """Inside, what a database says when it cannot be used becomes Unavailable."""
    try:
        yield
    except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
        raise Unavailable(f"the database cannot be used now: {error.orig}") from error
    except sa.exc.InternalError as error:
        if getattr(error.orig, "sqlstate", "") != _READ_ONLY:
            raise
        raise Unavailable(f"the database cannot be used now: {error.orig}") from error
    except sa.exc.TimeoutError as error:
        raise Unavailable("the database cannot be used now: every connection is busy") from error


class Writer:
    """Runs jobs on the writing connection, in order; a job's future resolves after its commit.

    SQLite allows one writer at a time: with all writes of a process in one thread they wait in this queue and
    never in the database's lock. Arguments: engine, whose connections may write.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: queue.SimpleQueue[tuple[Callable[[Connection], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self.commits, self.commit_s = 0, 0.0  # transactions that were committed, and the time in them
        self._thread = threading.Thread(target=self._work, name="ampwatch-writer", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many jobs are queued."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[Connection], T]) -> Future[T]:
        """Queue `job(connection)`. The future holds its result once committed, or the error that rolled it back."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._perform(*item)

    def _perform(self, job: Callable[[Connection], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        started = time.perf_counter()
        try:
            with told_when_unavailable(), self._engine.begin() as connection:
                result = job(connection)
            self.commits, self.commit_s = self.commits + 1, self.commit_s + time.perf_counter() - started
        except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)
