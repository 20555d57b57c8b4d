"""The order in which the training loop calls the scaler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .moments import Moment

DIVIDED: Final = 2  # attempts
_BYPASSED: Final = frozenset(
    {
        "step_outside_scaler",
        "step_after_unscale",
        "unscaled_step",
        "unscaled_backward",
        "divided_by_hand",
        "stepped_again",
        "scale_without_step",
        "scale_unused",
    }
)


def call_order(case: Case) -> Iterator[Finding]:
    """One finding for each kind: the first fault is the headline, what else was seen is evidence."""
    by_kind: dict[str, list[Event]] = {}
    for event in case.described.call_faults.events:
        if event.data.get("fault") in texts.FAULTS:
            by_kind.setdefault(_kind_of(event), []).append(event)
    for kind, events in by_kind.items():
        yield _finding(case, kind, events)
    yield from _divided_again(case)


def scaled_by_hand(case: Case) -> Iterator[Finding]:
    """A loss that is multiplied by the scale once more, or gradients that are divided by it before unscale_."""
    if (seen := _by_hand(case)) is None:
        return
    way, since, evidence = seen
    yield case.finding(
        "scaler_bypassed",
        "error",
        texts.HEADLINES["scaler_bypassed"].format(
            first=texts.at(since), fault=texts.FAULTS[f"scaled_by_hand.{way}"], raised=texts.RAISED[False]
        ),
        first=since,
        evidence=[evidence],
        advice=texts.ADVICE["scaler_bypassed"],
        confidence=0.8,
    )


def _by_hand(case: Case) -> tuple[str, Moment, Evidence] | None:
    """Which way, since when, and what shows it: a loss that fell with the scale, or a norm that leapt by it."""
    habits = case.stream.habits
    tied, jump = habits.tied.found, habits.jump.found
    if tied is not None and case.described.scaler_class:  # a trace may hold the scaled loss
        text = texts.TIED.format(
            attempts=texts.skipped(tied.attempts),
            loss=f"{tied.loss:.3g}",
            scale=texts.power(tied.scale),
            loss_last=f"{tied.loss_last:.3g}",
            scale_last=texts.power(tied.scale_last),
        )
        return "times", tied.since, Evidence(text=text, value=tied.loss, attempt=tied.since.attempt)
    faults = {event.data.get("fault") for event in case.described.call_faults.events}
    if jump is None or (jump.way == "by" and "divided_by_hand" in faults):  # which was seen itself
        return None
    text = f"From {texts.at(jump.since)} on the true gradient norm is {jump.ratio:.3g} × what it was, at loss scale {texts.power(jump.scale)}."
    return jump.way, jump.since, Evidence(text=text, value=jump.ratio, attempt=jump.since.attempt)


def _divided_again(case: Case) -> Iterator[Finding]:
    """Gradients that were unscaled, were not applied, and that a backward pass of the next window adds to."""
    for stream in case.streams.values():
        seen = stream.habits.divided
        if seen.first is None or seen.count < DIVIDED:
            continue
        text = f"A gradient was left over from a window that was unscaled and not stepped: {texts.times(seen.count, 'time')}."
        yield case.finding(
            "call_order",
            "error",
            texts.HEADLINES["call_order"].format(
                first=texts.at(seen.first), fault=texts.FAULTS["divided_again"], raised=texts.RAISED[False]
            ),
            first=seen.first,
            evidence=[Evidence(text=text, value=seen.count, unit="attempts", attempt=seen.first.attempt)],
            advice=texts.ADVICE["call_order"],
            confidence=0.9,
        )


def _finding(case: Case, kind: str, events: Sequence[Event]) -> Finding:
    attempt = max(events[0].data.get("since", events[0].attempt), 0)
    first = Moment(attempt, case.step_of(attempt))
    raised = bool(events[0].data.get("raised"))
    what = _words(case, events[0])
    headline = texts.HEADLINES[kind].format(first=texts.at(first), fault=what, raised=texts.RAISED[raised])
    evidence = _evidence(case, events)
    key = "call_order.closure" if events[0].data["fault"] in ("closure", "closure_wanted") else kind
    return case.finding(
        kind, "error", headline, first=first, evidence=evidence, advice=texts.ADVICE[key], confidence=1.0
    )


def _evidence(case: Case, events: Sequence[Event]) -> list[Evidence]:
    """Each fault once, with the calls around its first occurrence."""
    seen: dict[str, list[Event]] = {}
    for event in events:
        seen.setdefault(_words(case, event), []).append(event)
    return [_told(what, same) for what, same in seen.items()]


def _told(what: str, events: Sequence[Event]) -> Evidence:
    count = sum(event.repeat for event in events)
    order = " → ".join(events[0].data.get("order") or [])
    text = f"Seen {texts.times(count, 'time')}: {what}. Calls: {order}."
    return Evidence(text=text, value=count, attempt=events[0].attempt)


def _words(case: Case, event: Event) -> str:
    return texts.FAULTS[event.data["fault"]].format(
        optimizer=event.data.get("class") or case.described.optimizer_name(event.data.get("optimizer"))
    )


def _kind_of(event: Event) -> str:
    """Gradients that never went through the scaler, and torch does not notice, go past it."""
    fault, raised = event.data["fault"], event.data.get("raised")
    bypassed = fault in _BYPASSED or (fault == "step_without_scale" and not raised)
    return "scaler_bypassed" if bypassed else "call_order"
