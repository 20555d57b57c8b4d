"""A loss scale that has come to its end: held at a minimum, or on its way to where its reciprocal is infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .episodes import NEAR, Episode
from .evidence import gradients_at_first, link
from .findings import Evidence, Finding, Severity
from .several import starved_of

FLOOR_ERROR, FLOOR_FATAL = 5, 10  # skips in a row that leave the scale as it was
DEAD_LOG2: Final = -128  # 1/S is infinite in float32 at and below 2^-128
DEAD_RUN: Final = 20


def scale_floor(case: Case) -> Iterator[Finding]:
    """An open run of skips at a scale that does not fall any more."""
    episode = case.stream.open
    if (
        episode is None
        or episode.held < FLOOR_ERROR + case.stream.hysteresis - 1
        or episode.first_held is None
        or any(starved_of(case, episode))
        or not math.isfinite(episode.scale_last)
    ):
        return
    severity: Severity = "fatal" if episode.held >= FLOOR_FATAL or episode.at_one > FLOOR_ERROR else "error"
    scale, skips = texts.power(episode.scale_last), texts.skipped(episode.held)
    text = f"{skips} in a row at {scale}, {texts.skipped(episode.skips)} in a row in all; no step taken among them."
    yield case.finding(
        "scale_floor",
        severity,
        texts.HEADLINES["scale_floor"].format(
            scale=scale, skips=texts.skipped(episode.skips), first=texts.at(episode.first)
        ),
        first=episode.first,
        evidence=[
            Evidence(text=text, value=episode.held, unit="attempts", attempt=episode.first_held.attempt)
        ],
        advice=texts.ADVICE["scale_floor"],
        chain=[link("scale_floor", episode.first_held)],
    )


def dead_zone(case: Case) -> Iterator[Finding]:
    """A long run of skips that nears the scale at which the first healthy batch destroys the weights."""
    for episode in case.stream.all_episodes():
        if episode.skips >= DEAD_RUN and 0 <= episode.scale_after < NEAR:
            yield _dead_zone(case, episode)


def _dead_zone(case: Case, episode: Episode) -> Finding:
    left = _attempts_left(episode)
    when = "from here on" if left == 0 else f"after {texts.times(left, 'more skip')}"
    closed = episode.closed
    after = (
        texts.RECOVERY["recovered"].format(closed=texts.at(closed)) if closed else texts.RECOVERY["dead_zone"]
    )
    scale = texts.power(episode.scale_after)
    text = f"The loss scale fell from {texts.power(episode.scale)} to {scale} in {texts.skipped(episode.skips)}; 1/S is infinite from 2^-128 down."
    return case.finding(
        "dead_zone",
        "fatal",
        texts.HEADLINES["dead_zone"].format(
            first=texts.at(episode.first), scale=scale, when=when, recovery=after
        ),
        first=episode.first,
        last=episode.last,
        evidence=[
            Evidence(text=text, value=episode.scale_after, attempt=episode.last.attempt),
            *gradients_at_first(case, episode),
        ],
        advice=texts.ADVICE["dead_zone"],
        state="recovered" if closed else "open",
        chain=[link("dead_zone", episode.near or episode.first)],
    )


def _attempts_left(episode: Episode) -> int:
    """Halvings to 2^-128; backoffs by another factor fall at the pace seen so far."""
    if episode.scale_after <= 2.0**DEAD_LOG2:
        return 0
    fallen = math.log2(episode.scale / episode.scale_after) / episode.skips
    return math.ceil((math.log2(episode.scale_after) - DEAD_LOG2) / fallen)
