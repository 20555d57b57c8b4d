"""Runs whose findings are not those of this engine over all that was read: they are judged anew, one now and then.

An older engine has judged them before an upgrade, or a server that has read of them ended before it judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.diagnosis.engine import ENGINE_VERSION

from .tables import run_state, runs

EVERY_S: Final = 60.0  # between two questions for such runs
_RUNS: Final = 400  # of one answer

_UNJUDGED: Final = 0  # engines count from 1

_state: Final = run_state.c
# A server of before there were these columns writes findings, and counts the revision on, but leaves them as they are.
_BY_AN_OLDER: Final = sa.or_(
    _state.engine < ENGINE_VERSION,
    sa.and_(_state.engine == ENGINE_VERSION, _state.judged != _state.revision),
)


def is_outdated(connection: Connection, run: str) -> bool:
    """Whether the findings of a run are of an engine before this one. Those of a newer are left alone."""
    query = sa.select(_state.run).where(_state.run == run, _BY_AN_OLDER)
    return connection.execute(query).first() is not None


def mark_unjudged(connection: Connection, run: str) -> None:
    """More was read of a run than its findings are about: whoever takes it over has to judge it."""
    mine = run_state.update().where(_state.run == run, _state.engine != _UNJUDGED)
    connection.execute(mine.values(engine=_UNJUDGED))


def as_judged() -> dict[Any, Any]:
    """What to write of a run beside what this engine found, where its revision is counted on at once."""
    return {"engine": ENGINE_VERSION, "judged": _state.revision + 1}


def still_judged() -> dict[Any, Any]:
    """What to write where the revision is counted on, and not because of findings."""
    return {"judged": sa.case((_state.judged == _state.revision, _state.revision + 1), else_=_state.judged)}


class Outdated:
    """Hands out runs to be judged anew, those heard of last first.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: list[str] = []  # the next one last
        self._ask_at = clock()

    def next(self, connection: Connection) -> list[str]:
        """One run, or none. Whoever asks seldom makes it seldom."""
        if not self._runs and self._clock() >= self._ask_at:
            self._ask_at = self._clock() + EVERY_S
            known = sa.select(runs.c.run).join(run_state, _state.run == runs.c.run).where(_BY_AN_OLDER)
            self._runs = list(connection.scalars(known.order_by(runs.c.last_seen.desc()).limit(_RUNS)))[::-1]
        return [self._runs.pop()] if self._runs else []
