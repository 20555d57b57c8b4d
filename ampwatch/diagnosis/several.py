"""Several optimizers under one scaler: one that is never stepped while others are, and losses that come now and then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .episodes import Episode
from .evidence import gradients_at_first
from .findings import Evidence, Finding
from .periods import Periodic

LAZY_RUN: Final = 4  # skips in a row, three periods, of a stream whose scale other streams raise again


def many_optimizers(case: Case) -> Iterator[Finding]:
    """An optimizer that overflows on its own, a stream that is always skipped, or skips with a period."""
    episode = case.stream.open
    starved, stepping = starved_of(case, episode) if episode else (0, 0)
    if episode and starved:
        name, other = _names(case, starved), _names(case, stepping)
        yield _finding(case, "many_optimizers.starved", episode, name=name, other=other)
    elif episode and _is_lazy(case, episode):
        name = _names(case, _lazy_ones(case, episode) or _bits(case, case.index))
        yield _finding(case, "many_optimizers.lazy", episode, name=name)
    elif seen := case.stream.lone_skips.period(episode, case.stream.interval):
        yield _periodic(case, seen)


def starved_of(case: Case, episode: Episode) -> tuple[int, int]:
    """Bits of the optimizers that are skipped alone, and of those that step beside them; zeros where none starves.

    Once the scale that they brought down has destroyed the weights, all are skipped, and it is still their doing.
    """
    applied = case.stream.applied
    destroyed = applied is not None and episode.first <= applied
    lasts = episode.steps_beside and not episode.nonfinite
    return episode.alone if lasts or destroyed else (0, 0)


def _is_lazy(case: Case, episode: Episode) -> bool:
    """Always skipped, at a scale that does not come down, since other streams of the scaler raise it again."""
    stuck = episode.skips >= LAZY_RUN and not episode.nonfinite and episode.scale_last >= episode.scale
    goes_on = any(other.taken and other.last > episode.first for other in case.beside())
    return stuck and goes_on and (not episode.starved or _lazy_ones(case, episode) > 0)


def _lazy_ones(case: Case, episode: Episode) -> int:
    """Of the optimizers that met inf or NaN in every attempt, bits, those that no other stream steps."""
    others = 0
    for index in case.streams:
        others |= _bits(case, index) if index != case.index else 0
    return episode.always & ~others


def _periodic(case: Case, seen: Periodic) -> Finding:
    stream, period = case.stream, seen.attempts
    goes_on = stream.last.attempt - seen.last.attempt <= period
    text = f"{seen.skips} single skips, each {period} attempts after the one before; the scale grows after {stream.interval}."
    return case.finding(
        "many_optimizers",
        "warning",
        texts.HEADLINES["many_optimizers.period"].format(period=period, first=texts.at(seen.first)),
        first=seen.first,
        evidence=[Evidence(text=text, value=period, unit="attempts", attempt=seen.first.attempt)],
        advice=texts.fill(texts.ADVICE["many_optimizers.period"], period=period),
        confidence=0.8,
        state="open" if goes_on else "recovered",
    )


def _finding(case: Case, key: str, episode: Episode, **words: str) -> Finding:
    first, skips = episode.first, episode.skips
    text = f"{texts.skipped(skips)} in a row of it; loss scale {texts.power(case.stream.scale)}."
    return case.finding(
        "many_optimizers",
        "error",
        texts.HEADLINES[key].format(first=texts.at(first), skips=skips, **words),
        first=first,
        evidence=[
            Evidence(text=text, value=skips, unit="attempts", attempt=first.attempt),
            *gradients_at_first(case, episode),
        ],
        advice=texts.ADVICE[key],
        confidence=0.9,
    )


def _bits(case: Case, stream: int) -> int:
    return sum(1 << i for i in case.described.streams.get(stream, {}).get("optimizers", []))


def _names(case: Case, bits: int) -> str:
    indices = [i for i in range(bits.bit_length()) if bits >> i & 1]
    return (
        " and ".join(f"{case.described.optimizer_name(i)} (optimizer {i})" for i in indices)
        or "the optimizer"
    )
