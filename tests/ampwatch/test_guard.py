"""Our own failures: swallowed, counted and reported in production, raised under AMPWATCH_STRICT."""

from __future__ import annotations

import weakref

import pytest

from ampwatch.guard import failures, guard


@pytest.fixture(autouse=True)
def production(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")


def fail(where, report=None):
    with guard(where, report):
        raise ZeroDivisionError("ours")


def test_a_failure_is_swallowed_and_counted():
    fail("test.swallowed")
    fail("test.swallowed")
    assert failures["test.swallowed"] == 2


def test_only_the_first_failure_of_a_place_is_logged(caplog):
    fail("test.logged")
    fail("test.logged")
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "ampwatch: test.logged failed: ZeroDivisionError('ours'). Training goes on, this record is lost."
    ]


def test_a_log_that_is_kept_keeps_nothing_of_the_training(caplog):
    """The frame that ours failed in, and those that it was called from."""

    class Tensor:
        """Stands for what a frame of the training holds."""

    def train():
        ours, tensor = Tensor(), Tensor()
        with guard("test.kept"):
            (lambda _: fail("test.kept_inside"))(ours)
            raise ZeroDivisionError
        return weakref.ref(ours), weakref.ref(tensor)

    held = train()
    assert len(caplog.records) == 2
    assert [each() for each in held] == [None, None]


def test_reports_come_at_powers_of_two():
    told = []
    for _ in range(9):
        fail("test.reported", lambda where, error, count: told.append((where, repr(error), count)))
    assert told == [("test.reported", "ZeroDivisionError('ours')", n) for n in (1, 2, 4, 8)]


def test_a_report_that_fails_is_swallowed_too():
    fail("test.report_fails", lambda *_: 1 / 0)
    assert failures["test.report_fails"] == 1


def test_interrupts_pass():
    with pytest.raises(KeyboardInterrupt), guard("test.interrupt"):
        raise KeyboardInterrupt


def test_as_a_decorator():
    @guard("test.decorator")
    def broken():
        raise ZeroDivisionError

    assert broken() is None


def test_strict_raises(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    with pytest.raises(ZeroDivisionError):
        fail("test.strict")
