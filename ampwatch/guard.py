"""The one place that swallows our own failures: a fault of ampwatch must never become a fault of the training.

    with guard("scaler.update", report):
        ...                             # an Exception in here is counted, reported and swallowed

With `AMPWATCH_STRICT=1` in the environment, as our tests run, it is raised instead.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Final, TypeAlias

from .notices import warn

Report: TypeAlias = Callable[[str, Exception, int], None]
"""Called with the place, the error and how often this place has failed, at the 1st, 2nd, 4th, 8th … failure."""

LOST: Final = "this record is lost"

failures: Counter[str] = Counter()
"""Failures swallowed in this process, by place."""

_log = logging.getLogger("ampwatch")


class Guard(ContextDecorator):
    """Context manager and decorator behind `guard`. It keeps no state, so one object may be entered again."""

    def __init__(self, where: str, report: Report | None = None, then: str = LOST) -> None:
        self._where = where
        self._report = report
        self._then = then

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or strict():
            return False
        failures[self._where] += 1
        count = failures[self._where]
        if count & (count - 1) == 0:
            try:
                self._tell(error, count)
            except Exception:  # noqa: BLE001 - what failed first may well be what reports
                _log.debug("the report of a failure failed", exc_info=True)
        return True

    def _tell(self, error: Exception, count: int) -> None:
        if count == 1:
            # As text: handlers that keep what was logged would keep the frames of the training, and their tensors.
            warn("%s failed: %s. Training goes on, %s.", self._where, repr(error), self._then)
            _log.debug("failure of ampwatch", exc_info=error)
        if self._report is not None:
            self._report(self._where, error, count)


def guard(where: str, report: Report | None = None, then: str = LOST) -> Guard:
    """Swallow, count and report what our own code raises; never what KeyboardInterrupt or exit() raise.

    Arguments:
        where: the place, for the count and the message, such as `scaler.update`.
        report: told of the 1st, 2nd, 4th, 8th … failure of this place; may be called on any thread.
        then: what comes of it, for the warning.
    """
    return Guard(where, report, then)


def strict() -> bool:
    """Whether failures are raised instead, as in our tests: `AMPWATCH_STRICT` is 1."""
    return os.environ.get("AMPWATCH_STRICT", "") == "1"
