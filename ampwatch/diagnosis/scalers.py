"""A scaler that began anew where it should have gone on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .facts import Reset, Stream
from .findings import Evidence, Finding
from .trends import ratio_of

NEAR: Final = 4.0  # a loss within this factor of the last one goes on from it


def scaler_recreated(case: Case) -> Iterator[Finding]:
    """Scalers made anew for optimizers that another one served, and that began at their initial scale."""
    lost = [(event, *pair) for event in case.described.recreated.events if (pair := _jump(case, event))]
    if not lost:
        return
    _, before, after = lost[0]
    assert after.first is not None
    text = f"{texts.times(len(lost), 'time')}: the scale jumped from {texts.power(before.scale)} to {texts.power(after.first_scale)}."
    yield case.finding(
        "scaler_state_lost",
        "warning",
        texts.HEADLINES["scaler_state_lost"].format(
            first=texts.at(after.first),
            before=texts.power(before.scale),
            after=texts.power(after.first_scale),
        ),
        first=after.first,
        evidence=[Evidence(text=text, value=len(lost), attempt=after.first.attempt)],
        advice=texts.ADVICE["scaler_state_lost"],
    )


def scaler_reset(case: Case) -> Iterator[Finding]:
    """A scaler that is given the state of a new one in the middle of a training that goes on."""
    events = case.described.restored.events
    seen = {reset: event for event in reversed(events) if (reset := _begun_anew(case, event))}
    if not seen:
        return
    reset, event = min(seen.items())
    before, after = texts.power(event.data["scale"]), texts.power(reset.scale)
    text = f"{texts.times(len(seen), 'time')}: load_state_dict() set the scale to {after}, from {before} the first time."
    yield case.finding(
        "scaler_state_lost",
        "warning",
        texts.HEADLINES["scaler_state_lost.reset"].format(
            first=texts.at(reset.at), before=before, after=after
        ),
        first=reset.at,
        evidence=[Evidence(text=text, value=len(seen), attempt=reset.at.attempt)],
        advice=texts.ADVICE["scaler_state_lost.reset"],
    )


def scaler_not_restored(runs: Sequence[Sequence[Case]]) -> Iterator[Finding]:
    """A job that went on with the training of another one, whose scaler did not.

    Arguments:
        runs: the cases of each producer of the run.
    """
    ordered = sorted(
        (cases for cases in runs if cases[0].stream.first), key=lambda cases: cases[0].stream.time_first
    )
    newest: dict[int, Case] = {}  # of each rank
    for first, *_ in ordered:
        before = newest.get(first.rank)
        if before and _goes_on(before.stream, first):
            yield from _not_restored(before, first)
        newest[first.rank] = first


def _not_restored(before: Case, after: Case) -> Iterator[Finding]:
    was, now = before.stream, after.stream
    scaler = after.described.scaler_of(after.index)
    first = now.first
    restored = after.described.restored.between(-1, first.attempt if first else 0)
    if (
        first is None
        or restored
        or now.first_scale != scaler.get("init_scale")
        or now.first_scale == was.scale
    ):
        return
    text = f"The job before ended at loss scale {texts.power(was.scale)}; no load_state_dict() was seen."
    yield after.finding(
        "scaler_state_lost",
        "warning",
        texts.HEADLINES["scaler_state_lost.resumed"].format(
            first=texts.at(first), before=texts.power(was.scale), after=texts.power(now.first_scale)
        ),
        first=first,
        evidence=[Evidence(text=text, value=was.scale, attempt=first.attempt)],
        advice=texts.ADVICE["scaler_state_lost"],
        confidence=0.9,
    )


def _begun_anew(case: Case, event: Event) -> Reset | None:
    """The attempt behind a load_state_dict(), if it is at the initial scale of its scaler, and training goes on."""
    told, scaler = event.data, case.described.scaler_of(event.stream)
    is_new = told.get("growth_tracker") == 0 and told.get("scale_after") == scaler.get("init_scale")
    if not is_new or told.get("scale") == told.get("scale_after"):
        return None
    mine = [i for i in case.streams if case.described.scaler_of(i) is scaler]
    near = range(event.attempt, event.attempt + len(case.streams))  # others may come first
    resets = [r for i in mine for r in case.streams[i].resets if r.at.attempt in near]
    first = min(resets, default=None)
    if first is None or first.scale != told["scale_after"]:
        return None
    kept = not first.is_counted and bool(case.described.went_on.between(event.attempt, event.attempt))
    return first if first.goes_on or kept else None


def _jump(case: Case, event: Event) -> tuple[Stream, Stream] | None:
    """The streams before and after, if the new scaler began at its initial scale and the old one stood elsewhere."""
    old, new = (_streams_of(case, event.data.get(key)) for key in ("replaces", "scaler"))
    if not old or not new:
        return None
    after = min(new, key=lambda s: s.first or s.last)
    assert after.first is not None
    ended = [s for s in old if s.last < after.first]
    if not ended:
        return None
    before = max(ended, key=lambda s: s.last)
    is_fresh = after.first_scale == event.data.get("init_scale") != before.scale
    return (before, after) if is_fresh else None


def _streams_of(case: Case, scaler: int | None) -> list[Stream]:
    told = case.described.streams
    mine = [i for i in told if told[i].get("scaler") == scaler]
    return [case.streams[i] for i in mine if i in case.streams and case.streams[i].first]


def _goes_on(was: Stream, case: Case) -> bool:
    """Whether a producer goes on with another's training: by its step, its optimizer's state, or its loss."""
    now = case.stream
    if now.first is None or not now.time_first >= was.time_last:
        return False
    first_check = next((e for e in case.described.checks.events if not e.data.get("static")), None)
    if now.first.step > 0 or (first_check and (first_check.data.get("steps_before") or 0) > 0):
        return True
    recent = was.recent.loss()
    far, near = ratio_of(was.first_loss, recent), ratio_of(now.first_loss, recent)
    return far > NEAR**2 and near < NEAR
