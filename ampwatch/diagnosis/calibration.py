"""Skips that need no action: the descent from the initial scale, probes at the ceiling, single spikes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from . import texts
from .case import Case
from .episodes import Episode, is_descending
from .findings import Advice, Evidence, Finding
from .spikes import Spike


def calibration(case: Case) -> Iterator[Finding]:
    """The descent to the ceiling, open while no step has been taken and the scale is above 1."""
    episodes = [e for e in case.stream.all_episodes() if e.calibrates]
    if not episodes or (case.stream.taken == 0 and not is_descending(episodes[-1].scale_after)):
        return
    first, last = episodes[0], episodes[-1]
    skips, is_open = sum(e.skips for e in episodes), last.closed is None
    headline = texts.HEADLINES["calibration.open" if is_open else "calibration"].format(
        skips=texts.skipped(skips),
        first=texts.at(first.first),
        span=texts.span(first.first, last.last),
        scale_first=texts.power(first.scale),
        scale=texts.power(last.scale_after),
    )
    yield case.finding(
        "calibration",
        "info",
        headline,
        first=first.first,
        last=last.last,
        evidence=[_skips(skips, case.stream.attempts)],
        advice=[] if is_open or skips < 5 else _start_lower(last),
        state="open" if is_open else "explained",
    )


def growth_probe(case: Case) -> Iterator[Finding]:
    """The ordinary skips at the ceiling, all of a stream in one finding."""
    probes, pending = case.stream.probes, case.stream.open
    current = pending if pending and pending.probes and not pending.calibrates else None
    first = probes.first or (current.first if current else None)
    if first is None:
        return
    skips = probes.skips + (current.skips if current else 0)
    last = current.last if current else probes.last
    headline = texts.HEADLINES["growth_probe"].format(
        skips=texts.skipped(skips),
        span=texts.span(first, last or first),
        share=texts.percent(skips / case.stream.attempts),
    )
    evidence = [_skips(skips, case.stream.attempts)]
    yield case.finding(
        "growth_probe", "info", headline, first=first, last=last, evidence=evidence, state="explained"
    )


def spike(case: Case) -> Iterator[Finding]:
    """Skips with a finite loss that no other rule explains, and that ended; and losses that stood out without one."""
    for episode in case.stream.all_episodes():
        quiet = not (episode.nonfinite or episode.trend or episode.calibrates)
        if quiet and not (episode.closed is None and (episode.probes or episode.at_one)):
            yield _spike(case, episode)
    spikes = case.stream.spikes
    first = spikes.first or spikes.pending
    if first is not None:
        yield _of_loss(case, first, spikes.pending or spikes.newest or first, spikes.count)


def _of_loss(case: Case, first: Spike, newest: Spike, count: int) -> Finding:
    recovery = (
        texts.RECOVERY["recovered"].format(closed=texts.at(first.over))
        if first.over
        else texts.RECOVERY["unknown"]
    )
    text = f"The loss was {first.loss:.4g}; the largest of the 64 losses before was {first.usual:.4g}."
    evidence = [Evidence(text=text, value=first.loss, attempt=first.at.attempt)]
    if newest != first:
        again = f"Seen {texts.times(count + (newest.over is None), 'time')}, the last time at {texts.at(newest.at)}."
        evidence.append(Evidence(text=again, attempt=newest.at.attempt))
    return case.finding(
        "spike",
        "info",
        texts.HEADLINES["spike.loss"].format(
            first=texts.at(first.at), ratio=f"{first.ratio:.3g}", recovery=recovery
        ),
        first=first.at,
        last=newest.over or newest.at,
        evidence=evidence,
        confidence=0.7,
        state="recovered" if newest.over else "open",
    )


def _spike(case: Case, episode: Episode) -> Finding:
    closed = episode.closed
    recovery = (
        texts.RECOVERY["recovered"].format(closed=texts.at(closed)) if closed else texts.RECOVERY["unknown"]
    )
    headline = texts.HEADLINES["spike"].format(
        skips=texts.skipped(episode.skips), first=texts.at(episode.first), recovery=recovery
    )
    evidence = [
        Evidence(
            text=f"The first skip met {texts.times(episode.first_bad_elements, 'element')} that were not finite.",
            value=episode.first_bad_elements,
            attempt=episode.first.attempt,
        )
    ]
    return case.finding(
        "spike",
        "info",
        headline,
        first=episode.first,
        last=episode.last,
        evidence=evidence,
        confidence=0.7,
        state="recovered" if closed else "open",
    )


def _skips(skips: int, attempts: int) -> Evidence:
    share = skips / attempts
    return Evidence(
        text=f"{skips} of {attempts} attempts skipped ({texts.percent(share)}).", value=share, unit="share"
    )


def _start_lower(last: Episode) -> list[Advice]:
    return texts.fill(texts.ADVICE["calibration"], settled_log2=round(math.log2(last.scale_after)))
