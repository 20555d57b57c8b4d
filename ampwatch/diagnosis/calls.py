"""The order in which the training loop calls the scaler."""

from __future__ import annotations

from collections.abc import Iterator

from ampwatch.records import Event

from . import texts
from .case import Case
from .facts import Moment
from .findings import Evidence, Finding


def call_order(case: Case) -> Iterator[Finding]:
    """One finding for each kind of fault, at its first occurrence."""
    firsts: dict[str, Event] = {}
    counts: dict[str, int] = {}
    for event in case.described.call_faults.events:
        fault = str(event.data.get("fault"))
        firsts.setdefault(fault, event)
        counts[fault] = counts.get(fault, 0) + event.repeat
    for fault, event in firsts.items():
        if fault in texts.FAULTS:
            yield _finding(case, fault, event, counts[fault])


def _finding(case: Case, fault: str, event: Event, count: int) -> Finding:
    raised = bool(event.data.get("raised"))
    kind = "scaler_bypassed" if _bypasses(fault, raised) else "call_order"
    first = Moment(max(event.attempt, 0), event.step)
    what = texts.FAULTS[fault].format(optimizer=case.described.optimizer_name(event.data.get("optimizer")))
    headline = texts.HEADLINES[kind].format(first=texts.at(first), fault=what, raised=texts.RAISED[raised])
    order = " → ".join(event.data.get("order") or [])
    evidence = [
        Evidence(
            text=f"Calls: {order}. Seen {texts.times(count, 'time')}.", value=count, attempt=first.attempt
        )
    ]
    return case.finding(
        kind, "error", headline, first=first, evidence=evidence, advice=texts.CALLS, confidence=1.0
    )


def _bypasses(fault: str, raised: bool) -> bool:
    """Gradients that never went through the scaler, and torch does not notice."""
    return fault == "step_outside_scaler" or (fault == "step_without_scale" and not raised)
