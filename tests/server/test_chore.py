"""What is done again and again in a thread: it survives failures, can be hurried, and ends when told to."""

import queue
import threading

import pytest

from ampwatch_server.chore import Chore
from ampwatch_server.writer import Unavailable


def test_what_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    outcomes, done = iter([ZeroDivisionError("by hand"), Unavailable("no database")]), threading.Event()

    def do() -> None:
        for error in outcomes:
            raise error
        done.set()

    chore = Chore("washing", do, every_s=0.01)
    chore.start()
    assert done.wait(60)
    chore.stop()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("ERROR", "washing: failed; trying again"),
        ("WARNING", "washing: no database; trying again"),
    ]


def test_one_that_is_hurried_does_not_wait() -> None:
    times: queue.SimpleQueue[int] = queue.SimpleQueue()
    chore = Chore("washing", lambda: times.put(1), every_s=3600)
    chore.start()
    assert times.get(timeout=60)
    chore.hurry()
    assert times.get(timeout=60)
    chore.stop()
    assert times.empty()


def test_one_that_is_told_to_stop_ends_its_pause() -> None:
    paused = threading.Event()

    def do() -> None:
        paused.set()
        chore.pause(3600)

    chore = Chore("washing", do, every_s=3600)
    chore.start()
    assert paused.wait(60)
    assert not chore.is_stopping()
    chore.stop(60)
    assert chore.is_stopping()


def test_one_that_was_never_started_can_be_stopped() -> None:
    Chore("washing", lambda: None, every_s=1).stop()
