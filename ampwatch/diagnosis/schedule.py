"""A learning rate schedule that goes on while steps are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .habits import Schedule

MANY, SHARE = 10, 0.01  # steps ahead, and share of the steps taken, both passed for a warning
CHANGES, PER_STEP = 3, 0.5  # fewer, or of fewer attempts while it moves, and it is no schedule by step
WARM_UP: Final = 3  # skips before the first step that used up a warm-up
SETTLED: Final = 20  # steps taken before it is known that the warm-up was all


def schedule_ahead(case: Case) -> Iterator[Finding]:
    """Steps of the schedule that no step of the optimizer went with."""
    schedule = case.stream.habits.schedule
    ahead = schedule.ahead
    by_step = schedule.changes >= CHANGES and schedule.change_share >= PER_STEP
    if not ahead or schedule.first is None or not by_step:
        return
    over = _warm_up_is_over(schedule)
    late = schedule.late > MANY and schedule.late > SHARE * case.stream.taken
    key = "schedule_ahead.warm_up" if over else "schedule_ahead"
    text = f"The learning rate changed after {ahead} skipped attempts; {case.stream.taken} steps were taken."
    yield case.finding(
        "schedule_ahead",
        "warning" if over or late else "info",
        texts.HEADLINES[key].format(
            ahead=texts.times(ahead, "step"),
            first=texts.at(schedule.first),
            taken=texts.at(case.stream.first_taken or schedule.first),
        ),
        first=schedule.first,
        evidence=[Evidence(text=text, value=ahead, unit="steps", attempt=schedule.first.attempt)],
        advice=texts.ADVICE["schedule_ahead"],
        confidence=0.9,
        state="open" if over or late else "explained",
    )


def _warm_up_is_over(schedule: Schedule) -> bool:
    """The learning rate had stopped rising before the first step, while all was skipped, and never rose again."""
    if schedule.early < WARM_UP or schedule.taken < SETTLED:
        return False
    rose = schedule.at_start < 0.5 * schedule.at_first_step
    return rose and max(schedule.highest_before, schedule.highest_after) == schedule.highest_before
