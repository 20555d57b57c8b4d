"""Whether anything is learned: every attempt is skipped, or steps are taken at a scale below 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .episodes import Episode
from .evidence import gradients_at_first
from .findings import Evidence, Finding, Severity
from .several import starved_of

NONFINITE_ERROR, NONFINITE_FATAL = 5, 10  # attempts without a step, the loss not finite
SUMMED: Final = 100  # steps taken at a scale below 1
STILL: Final = 20  # steps taken at a learning rate of 0; a warm-up begins with one
MOST_GROUPS: Final = (
    16  # of parameters, of which the learning rates are recorded for certain (docs/format.md)
)
FATAL_AFTER: Final = 5  # attempts at a scale of 1 and below, or one that is not finite; the loss is


def no_updates(case: Case) -> Iterator[Finding]:
    """An open run of skips that no falling scale will end."""
    episode = case.stream.open
    severity = _severity(episode) if episode else None
    if episode is None or severity is None or episode.steps_beside or any(starved_of(case, episode)):
        return
    lost = not math.isfinite(episode.scale_after)
    headline = texts.HEADLINES["no_updates.scale" if lost else "no_updates"].format(
        first=texts.at(episode.first),
        skips=texts.skipped(episode.skips),
        scale=texts.power(episode.scale_after),
    )
    taken = f"Steps taken before: {episode.taken_before}; since {texts.at(episode.first)}: 0 of {episode.attempts}."
    yield case.finding(
        "no_updates",
        severity,
        headline,
        first=episode.first,
        evidence=[
            Evidence(text=taken, value=0, unit="steps", attempt=episode.first.attempt),
            *gradients_at_first(case, episode),
        ],
        advice=texts.ADVICE["no_updates.scale" if lost else "no_updates"],
        confidence=0.9,
    )


def _severity(episode: Episode) -> Severity | None:
    if episode.nonfinite:
        lasting = episode.taken_before == 0 and episode.nonfinite >= NONFINITE_ERROR
        return ("fatal" if episode.nonfinite >= NONFINITE_FATAL else "error") if lasting else None
    if episode.at_one == 0 or episode.probes:
        return None
    return "fatal" if episode.at_one > FATAL_AFTER else "error"


def rate_of_zero(case: Case) -> Iterator[Finding]:
    """Steps that are taken at a learning rate of 0 in every group, one after another up to now."""
    still = case.stream.habits.still
    groups = max((len(o.get("lr") or ()) for o in case.described.optimizers_of(case.index)), default=0)
    if still.since is None or still.run < STILL or groups > MOST_GROUPS:
        return
    steps = texts.times(still.run, "step")
    text = f"The learning rate of every group was 0 in the last {steps} taken."
    yield case.finding(
        "no_updates",
        "warning",
        texts.HEADLINES["no_updates.rate"].format(first=texts.at(still.since), steps=steps),
        first=still.since,
        evidence=[Evidence(text=text, value=still.run, unit="steps", attempt=still.since.attempt)],
        advice=texts.ADVICE["no_updates.rate"],
        confidence=0.9,
    )


def summed_loss(case: Case) -> Iterator[Finding]:
    """A scale that came down below 1, at which steps are taken and the loss falls: legitimate, and explained."""
    stream, path = case.stream, case.stream.path
    since, loss = path.below_since, stream.recent.loss()
    if since is None or stream.first_scale < 1 or path.below_one < SUMMED or not loss < path.loss_below:
        return
    if any(e.nonfinite > e.innocent and e.scale_after < 1 for e in stream.episodes):
        return  # what brought it down was no sum
    text = f"{texts.times(path.below_one, 'step')} taken at a scale below 1; the loss fell from {path.loss_below:.4g} to {loss:.4g}."
    yield case.finding(
        "summed_loss",
        "info",
        texts.HEADLINES["summed_loss"].format(first=texts.at(since), scale=texts.power(stream.scale)),
        first=since,
        evidence=[Evidence(text=text, value=path.below_one, unit="steps", attempt=since.attempt)],
        advice=texts.ADVICE["summed_loss"],
        confidence=0.8,
        state="explained",
    )


def unscaled_by_new_scale(case: Case) -> Iterator[Finding]:
    """A framework that updates its scale before it unscales: half a gradient at each growth."""
    path, first = case.stream.path, case.stream.path.first_halved
    if (
        not case.described.scaler_of(case.index).get("new_scale")
        or first is None
        or path.halved <= path.whole
    ):
        return
    text = f"At {path.halved} of {path.halved + path.whole} growths the norm was half of the norms before."
    yield case.finding(
        "unscaled_by_new_scale",
        "info",
        texts.HEADLINES["unscaled_by_new_scale"].format(first=texts.at(first)),
        first=first,
        evidence=[Evidence(text=text, value=path.halved, unit="growths", attempt=first.attempt)],
        state="explained",
    )
