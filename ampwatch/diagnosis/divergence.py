"""Loss and true gradient norm that grow together, before and between skips."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .episodes import Episode
from .findings import Evidence, Finding
from .trends import Trend

EARLY_ATTEMPTS: Final = 24  # without a skip, the whole window of the trend must be there


def divergence(case: Case) -> Iterator[Finding]:
    """A divergence that led to skips, or an early warning of one."""
    seen: dict[int, Episode] = {}
    for episode in case.stream.all_episodes():
        if episode.trend:
            seen[episode.trend.onset.attempt] = episode
    for episode in seen.values():
        assert episode.trend is not None
        yield _diverged(case, episode.trend)
    trend = case.stream.recent.trend()
    if trend and not seen and case.stream.attempts >= EARLY_ATTEMPTS:
        yield _early(case, trend)


def _diverged(case: Case, trend: Trend) -> Finding:
    settled = case.stream.recent.settled(trend)
    first = texts.at(trend.onset)
    recovery = "The loss has come back since." if settled else texts.RECOVERY["diverged"].format(first=first)
    return case.finding(
        "divergence",
        "fatal",
        texts.HEADLINES["divergence"].format(first=first, recovery=recovery, **_ratios(trend)),
        first=trend.onset,
        evidence=_evidence(trend),
        advice=texts.fill(texts.ADVICE["divergence"], first=first, clip=f"{trend.norm_p99:.2g}"),
        confidence=0.9,
        state="recovered" if settled else "open",
    )


def _early(case: Case, trend: Trend) -> Finding:
    first = texts.at(trend.onset)
    return case.finding(
        "divergence",
        "warning",
        texts.HEADLINES["divergence.early"].format(first=first, **_ratios(trend)),
        first=trend.onset,
        evidence=_evidence(trend),
        advice=texts.fill(texts.ADVICE["divergence"], first=first, clip=f"{trend.norm_p99:.2g}"),
        confidence=0.6,
    )


def _ratios(trend: Trend) -> dict[str, str]:
    return {
        "loss_ratio": f"{trend.loss / trend.loss_p99:.3g}",
        "norm_ratio": f"{trend.norm / trend.norm_p99:.3g}",
    }


def _evidence(trend: Trend) -> list[Evidence]:
    loss = f"The loss rose to {trend.loss:.4g}; 99 % of the values before were below {trend.loss_p99:.4g}."
    norm = f"The true gradient norm rose to {trend.norm:.4g}; 99 % before were below {trend.norm_p99:.4g}."
    return [
        Evidence(text=loss, value=trend.loss, attempt=trend.seen.attempt),
        Evidence(text=norm, value=trend.norm, attempt=trend.seen.attempt),
    ]
