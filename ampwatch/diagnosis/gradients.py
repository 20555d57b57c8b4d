"""Gradients that the loop has touched before the scaler saw them, or has not cleared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .habits import Seen
from .moments import Moment

RESIDUES: Final = 2  # attempts in a row that begin with gradients left over
SATURATIONS: Final = 2
REPLACED: Final = 5  # attempts, not in a row, where nothing else says that something replaces inf
IN_A_ROW: Final = 3  # a loss that is NaN now and then may hold a mean over nothing, whose gradient is 0


def clip_scaled(case: Case) -> Iterator[Finding]:
    """A norm, or a largest element, of the scaled gradient that is pinned."""
    habits = case.stream.habits
    found, what = habits.norm.found, "norm"
    if found is None:
        found, what = habits.largest.found, "value"
    if found is None:
        return
    value, scale = found.value, texts.power(case.stream.scale)
    measured = "L2 norm" if what == "norm" else "largest element"
    text = f"The {measured} of the scaled gradient is {value:.6g} in every attempt, whatever the loss and the scale are."
    true = value / case.stream.scale if case.stream.scale > 0 else math.inf
    at_scale = f"At loss scale {scale} that is a true {measured} of {true:.3g}."
    yield case.finding(
        "clip_scaled",
        "error",
        texts.HEADLINES["clip_scaled"].format(
            first=texts.at(found.since), value=f"{value:.4g}", scale=scale, measured=measured
        ),
        first=found.since,
        evidence=[Evidence(text=text, value=value, attempt=found.since.attempt), Evidence(text=at_scale)],
        advice=texts.fill(texts.ADVICE[f"clip_scaled.{what}"], value=f"{value:.4g}"),
        confidence=0.95,
    )


def cleaned_gradients(case: Case) -> Iterator[Finding]:
    """Something makes numbers of inf and NaN between backward and unscale_."""
    habits, hooks = case.stream.habits, hooks_on(case)
    pinned = habits.norm.found or habits.largest.found
    looks = looks_at_raw(case)
    seen_whole = not hooks and any(not event.data.get("nonfinite") for event in looks)
    lasts = habits.cleaned.longest >= IN_A_ROW and not seen_whole
    told = [
        ("raw", _seen_broken(looks), 1),
        ("cleaned", habits.cleaned, 1 if hooks or lasts else math.inf),
        ("saturated", habits.saturated, SATURATIONS),
        ("saturated", habits.at_limit, SATURATIONS if hooks or habits.infinite.count else math.inf),
        ("saturated", habits.replaced, SATURATIONS if hooks else math.inf if pinned else REPLACED),
        ("unhurt", habits.unhurt, 1 if hooks else math.inf),
    ]
    how, seen = next(((how, seen) for how, seen, least in told if seen.count >= least), ("", None))
    if seen is None or seen.first is None or _is_poisoned(case, seen.first.attempt):
        return
    yield case.finding(
        "cleaned_gradients",
        "error",
        texts.HEADLINES[_key(case, "cleaned_gradients")].format(first=texts.at(seen.first)),
        first=seen.first,
        evidence=[_count(seen, texts.CLEANED[how]), *hooks],
        advice=texts.ADVICE["cleaned_gradients"],
        confidence=0.95 if how in ("raw", "cleaned") else 0.8,
    )


def looks_at_raw(case: Case) -> list[Event]:
    """What was seen of this stream's gradients as backward left them, behind hooks on parameters."""
    return [event for event in case.described.accumulated.events if event.stream == case.index]


def _seen_broken(looks: Sequence[Event]) -> Seen:
    """The attempts in which they were not finite, and what was unscaled was."""
    broken = [Moment(event.attempt, event.step) for event in looks if event.data.get("nonfinite")]
    return Seen(len(broken), first=broken[0], last=broken[-1]) if broken else Seen()


def _is_poisoned(case: Case, attempt: int) -> bool:
    """Whether weights were known not to be finite: such a loss is theirs, and a part of the model beside them may be whole."""
    checks = case.described.finite_checks.events
    return any(e.attempt <= attempt and e.data.get("parameters", {}).get("count") for e in checks)


def grads_not_cleared(case: Case) -> Iterator[Finding]:
    """Backward passes that add to gradients of an attempt before."""
    seen = case.stream.habits.residue
    if seen.first is None or seen.longest < RESIDUES:
        return
    share = seen.count / case.stream.attempts
    when = "always" if share > 0.9 or case.stream.skips == 0 else "skips"
    yield case.finding(
        "grads_not_cleared",
        "error",
        texts.HEADLINES[_key(case, "grads_not_cleared")].format(first=texts.at(seen.first)),
        first=seen.first,
        evidence=[_count(seen, texts.LEFT_OVER), Evidence(text=texts.NOT_CLEARED[when])],
        advice=texts.ADVICE["grads_not_cleared"],
        confidence=0.95,
    )


def norm_overflow(case: Case) -> Iterator[Finding]:
    """A norm that the user logs is not finite, while every gradient is."""
    seen = case.stream.habits.overflown_norms
    if seen.first is None:
        return
    yield case.finding(
        "norm_overflow",
        "error",
        texts.HEADLINES["norm_overflow"].format(first=texts.at(seen.first)),
        first=seen.first,
        evidence=[_count(seen, texts.OVERFLOWN_NORM)],
        advice=texts.ADVICE["norm_overflow"],
        confidence=0.9,
    )


def accumulation(case: Case) -> Iterator[Finding]:
    """A norm that grows with the number of micro-batches in a window, as that of a sum does."""
    windows = case.stream.habits.windows
    power = windows.of_a_sum()
    if power is None or windows.first is None:
        return
    text = f"In {power.windows} windows of another length than usual the norm went with the length to the power of {power.value:.2f}; a mean has 0, a sum 1."
    yield case.finding(
        "accumulation",
        "warning",
        texts.HEADLINES["accumulation"].format(first=texts.at(windows.first)),
        first=windows.first,
        evidence=[Evidence(text=text, value=power.value, attempt=windows.first.attempt)],
        advice=texts.ADVICE["accumulation"],
        confidence=0.8,
    )


def _key(case: Case, kind: str) -> str:
    """Of the headline: where no scaler skips steps, other things come of it."""
    return f"{kind}.unscaled" if case.described.is_unscaled else kind


def _count(seen: Seen, what: str) -> Evidence:
    assert seen.first is not None
    text = f"{what} Seen {texts.times(seen.count, 'time')}, first at {texts.at(seen.first)}."
    return Evidence(text=text, value=seen.count, unit="attempts", attempt=seen.first.attempt)


def hooks_on(case: Case) -> list[Evidence]:
    """Hooks on parameters, which see gradients before the scaler does."""
    count = max((check.data.get("hooks") or 0 for check in case.described.checks.events), default=0)
    if not count:
        return []
    return [
        Evidence(
            text=f"{texts.times(count, 'parameter')} with a hook of the loop's own, which may do it.",
            value=count,
        )
    ]
