"""Fused optimizers, which divide by the scale and skip by themselves: those that do not skip, or divide twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .moments import Moment

LARGE_SCALE: Final = 256.0  # from which on a division by it cannot be mistaken for a first moment of 0.01 g
EXACT: Final = 0.01  # relative

_CHANGED: Final = {
    "moved": "weights",
    "state": "what it keeps of its parameters",
    "count": "its count of steps",
}


def fused_optimizer(case: Case) -> Iterator[Finding]:
    """An overflow that was applied or that left a moment of nothing, or gradients that were divided by the scale twice."""
    mine = case.described.streams.get(case.index, {}).get("optimizers", [])
    steps = [e for e in case.described.fused_steps.events if e.data.get("optimizer") in mine]
    yield from _divided_twice(case, steps)
    skipped = [e for e in steps if e.data.get("found_inf")]
    moved = next((e for e in skipped if e.data.get("moved") != 0), None)
    advanced = next((e for e in skipped if e.data.get("state", 0) != 0), None)
    counted = next((e for e in skipped if e.data.get("count", 0) != 0), None)
    unfilled = next((e for e in skipped if e.data.get("moved") == 0 != e.data.get("moment", 0)), None)
    if moved is not None:
        yield _changed(case, moved, "moved", "applied", 1.0)
    elif unfilled is not None:
        yield _unfilled(case, unfilled)
    elif advanced is not None:
        yield _changed(case, advanced, "state", "applied", 0.9)
    elif counted is not None:
        yield _changed(case, counted, "count", "counted", 0.9)
    else:
        yield from _applied_overflow(case)


def _changed(case: Case, event: Event, what: str, advice: str, sure: float) -> Finding:
    """Weights (`moved`), or what an optimizer keeps (`state`, `count`), that changed in a step that met inf or NaN.

    By a count alone the step was skipped all the same: only what is reckoned from it, as Adam's bias correction, is off.
    """
    first = Moment(max(event.attempt, 0), case.step_of(max(event.attempt, 0)))
    name, change = case.described.optimizer_name(event.data.get("optimizer")), event.data[what]
    text = f"found_inf was 1, and {_CHANGED[what]} changed by up to {change:.3g} in that step."
    return case.finding(
        "fused_optimizer",
        "fatal",
        texts.HEADLINES[f"fused_optimizer.{what}"].format(first=texts.at(first), optimizer=name),
        first=first,
        evidence=[Evidence(text=text, value=change, attempt=first.attempt)],
        advice=texts.fill(texts.ADVICE[f"fused_optimizer.{advice}"], first=texts.at(first)),
        confidence=sure,
    )


def _unfilled(case: Case, event: Event) -> Finding:
    """A moment that holds something after a first step that was skipped: torch's SGD allocates it and never fills it."""
    first = Moment(max(event.attempt, 0), case.step_of(max(event.attempt, 0)))
    name, moment = case.described.optimizer_name(event.data.get("optimizer")), event.data["moment"]
    text = f"The first step was skipped, and the momentum buffer it left reaches {moment:.3g}; it should not be there, or be 0."
    return case.finding(
        "fused_optimizer",
        "fatal",
        texts.HEADLINES["fused_optimizer.unfilled"].format(first=texts.at(first), optimizer=name),
        first=first,
        evidence=[Evidence(text=text, value=moment, attempt=first.attempt)],
        advice=texts.ADVICE["fused_optimizer.unfilled"],
        confidence=0.95,
    )


def _divided_twice(case: Case, steps: Sequence[Event]) -> Iterator[Finding]:
    for event in steps:
        told = _trace_of_division(event) if event.data.get("unscaled") else ""
        if told:
            yield _twice(case, event, told)
            return


def _trace_of_division(event: Event) -> str:
    """What of the step is 1/S of what it should be; empty where nothing is, or the scale is too small to tell."""
    data = event.data
    scale, gradient, lr = (data.get(key) or 0.0 for key in ("scale", "gradient", "lr"))
    if not scale >= LARGE_SCALE or not 0 < gradient < float("inf"):
        return ""
    if _is_one(data.get("gradient_after", 0.0) * scale / gradient):
        return "the gradient that it wrote back"
    if 1 / LARGE_SCALE < data.get("moment", 0.0) * scale / gradient <= 1 + EXACT:
        return "the first moment that it keeps"
    return (
        "the change of the weights"
        if lr and _is_one(data.get("moved", 0.0) * scale / (gradient * lr))
        else ""
    )


def _is_one(ratio: float) -> bool:
    return abs(ratio - 1) <= EXACT


def _twice(case: Case, event: Event, what: str) -> Finding:
    attempt = max(event.attempt, 0)
    first, scale = Moment(attempt, case.step_of(attempt)), event.data["scale"]
    name = case.described.optimizer_name(event.data.get("optimizer"))
    text = f"Of gradients that unscale_() had divided already, {what} is 1/S of what it should be, S = {texts.power(scale)}."
    return case.finding(
        "fused_optimizer",
        "fatal",
        texts.HEADLINES["fused_optimizer.twice"].format(
            first=texts.at(first), optimizer=name, scale=texts.power(scale)
        ),
        first=first,
        evidence=[Evidence(text=text, value=1 / scale, attempt=attempt)],
        advice=texts.ADVICE["fused_optimizer.twice"],
        confidence=0.95,
    )


def _applied_overflow(case: Case) -> Iterator[Finding]:
    """Parameters that became inf or NaN in an attempt whose step was skipped, by an optimizer that skips by itself."""
    fused = [o for o in case.described.optimizers_of(case.index) if o.get("fused")]
    for episode in case.stream.all_episodes():
        broken, last = episode.first_nonfinite, episode.last_finite
        if not fused or broken is None or last is None or episode.nonfinite < 1:
            continue
        checks = case.described.finite_checks.between(broken.attempt, episode.last.attempt)
        failed = next((c for c in checks if c.data.get("parameters", {}).get("count")), None)
        if failed is not None:
            yield _fused(case, last, broken, failed, str(fused[0].get("class")))
            return


def _fused(case: Case, last: Moment, broken: Moment, check: Event, name: str) -> Finding:
    tensor = str((check.data["parameters"].get("nonfinite") or ["?"])[0])
    text = (
        f"At {texts.at(last)} the loss was finite and the gradients were not, so that the step was to be skipped; "
        f"at {texts.at(broken)} the loss is not finite, and parameters are not, {tensor} first. No step was taken between."
    )
    return case.finding(
        "fused_optimizer",
        "fatal",
        texts.HEADLINES["fused_optimizer.applied"].format(
            first=texts.at(last), optimizer=name, tensor=tensor
        ),
        first=last,
        evidence=[Evidence(text=text, attempt=last.attempt, tensor=tensor)],
        advice=texts.fill(texts.ADVICE["fused_optimizer.applied"], first=texts.at(last)),
        confidence=0.9,
        tensor=tensor,
    )
