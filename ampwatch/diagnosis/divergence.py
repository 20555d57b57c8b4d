"""Loss and true gradient norm that grow together, before and between skips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .episodes import Episode
from .evidence import recovery
from .findings import Evidence, Finding
from .moments import Moment
from .trends import Trend

EARLY_ATTEMPTS: Final = 24  # without a skip, the whole window of the trend must be there
LARGE_STEP: Final = 0.5  # of each weight; few are as large when they are initialised
FIRST_STEPS: Final = 3  # taken, in which an optimizer of these moves each weight by about its learning rate:
MOVES_BY_RATE: Final = frozenset({"Adam", "AdamW", "NAdam", "Adamax", "Adagrad", "RMSprop", "Lion"})
BROKEN: Final = 3  # attempts whose loss is not finite, each with another batch


def divergence(case: Case) -> Iterator[Finding]:
    """A divergence that led to skips, or an early warning of one."""
    seen: dict[int, Episode] = {}
    for episode in case.stream.all_episodes():
        if episode.trend:
            seen[episode.trend.onset.attempt] = episode
    for episode in seen.values():
        assert episode.trend is not None
        yield _diverged(case, episode.trend)
    yield from _thrown(case)
    trend = case.stream.recent.trend()
    if trend and not seen and case.stream.attempts >= EARLY_ATTEMPTS:
        yield _early(case, trend)


def _diverged(case: Case, trend: Trend) -> Finding:
    settled = case.stream.recent.settled(trend)
    first = texts.at(trend.onset)
    back = "The loss has come back since." if settled else texts.RECOVERY["diverged"].format(first=first)
    return case.finding(
        "divergence",
        "fatal",
        texts.HEADLINES["divergence"].format(first=first, recovery=back, grown=_grown(trend)),
        first=trend.onset,
        evidence=list(_evidence(trend)),
        advice=texts.fill(texts.ADVICE["divergence"], first=first, clip=f"{trend.norm_p99:.2g}"),
        confidence=0.9,
        state="recovered" if settled else "open",
    )


def _thrown(case: Case) -> Iterator[Finding]:
    """The first steps of an optimizer that moves each weight by its learning rate, which is larger than weights are."""
    for episode in case.stream.all_episodes():
        is_first = 0 < episode.taken_before <= FIRST_STEPS and not episode.trend
        if not (is_first and episode.nonfinite >= BROKEN and LARGE_STEP <= episode.lr < math.inf):
            continue
        names = {str(o.get("class")) for o in case.described.optimizers_of(case.index)}
        if (
            names
            and names <= MOVES_BY_RATE
            and episode.first_nonfinite
            and math.isfinite(episode.loss_before)
        ):
            yield _by_rate(case, episode, episode.first_nonfinite, ", ".join(sorted(names)))


def _by_rate(case: Case, episode: Episode, first: Moment, name: str) -> Finding:
    rate = f"{episode.lr:.4g}"
    steps = "The first step" if episode.taken_before == 1 else f"The first {episode.taken_before} steps"
    before = (
        f"At the weights before, the loss was {episode.loss_before:.4g} (median) and finite in every attempt."
    )
    moved = f"In its first steps {name} moves each weight by about its learning rate, {rate}, whatever the gradient is."
    return case.finding(
        "divergence",
        "fatal",
        texts.HEADLINES["divergence.rate"].format(
            first=texts.at(first), steps=steps, rate=rate, recovery=recovery(episode, certain=True)
        ),
        first=first,
        evidence=[
            Evidence(text=before, value=episode.loss_before, attempt=max(first.attempt - 1, 0)),
            Evidence(text=moved, value=episode.lr),
        ],
        advice=texts.ADVICE["divergence.rate"],
        confidence=0.9,
        state="recovered" if episode.closed else "open",
    )


def _early(case: Case, trend: Trend) -> Finding:
    first = texts.at(trend.onset)
    return case.finding(
        "divergence",
        "warning",
        texts.HEADLINES["divergence.early"].format(first=first, grown=_grown(trend)),
        first=trend.onset,
        evidence=list(_evidence(trend)),
        advice=texts.fill(texts.ADVICE["divergence"], first=first, clip=f"{trend.norm_p99:.2g}"),
        confidence=0.6,
    )


def _grown(trend: Trend) -> str:
    loss = f"loss {trend.loss / trend.loss_p99:.3g} ×"
    if trend.depth:
        scale, high = map(texts.power, trend.depth)
        return f"{loss} what it was, and gradients overflow at loss scale {scale}, where {high} was clean"
    return f"{loss} and gradient norm {trend.norm / trend.norm_p99:.3g} × what they were"


def _evidence(trend: Trend) -> Iterator[Evidence]:
    before = "it was at most" if trend.is_young else "99 % of the values before were below"
    loss = f"The loss rose to {trend.loss:.4g}; {before} {trend.loss_p99:.4g}."
    yield Evidence(text=loss, value=trend.loss, attempt=trend.seen.attempt)
    norm = f"The true gradient norm rose to {trend.norm:.4g}; {before} {trend.norm_p99:.4g}."
    if trend.depth is None:
        yield Evidence(text=norm, value=trend.norm, attempt=trend.seen.attempt)
