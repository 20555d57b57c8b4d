"""What several rules say of an episode in the same words."""

from __future__ import annotations

import math
from typing import Final

from . import texts
from .case import Case
from .episodes import Episode
from .findings import Evidence, Link
from .moments import Moment

NAMED: Final = 3  # tensors
FAR: Final = 16.0  # times below where it was


def link(kind: str, since: Moment) -> Link:
    """What began, for the order of events."""
    return Link(kind, texts.SHORT[kind], since.attempt, since.step)


def to_no_avail(episode: Episode) -> list[Evidence]:
    """How far the scale fell while the loss stayed as it was."""
    if not 0 < episode.scale_after < episode.scale:
        return []
    halvings = round(math.log2(episode.scale / episode.scale_after))
    path = f"from {texts.power(episode.scale)} to {texts.power(episode.scale_after)}"
    text = f"The loss scale was halved {texts.times(halvings, 'time')}, {path}, to no avail: the scale is not the cause."
    return [Evidence(text=text, value=halvings, attempt=episode.last.attempt)]


def way_back(episode: Episode, interval: int) -> list[Evidence]:
    """How long the scale needs to grow back to where it was, if that is long."""
    if not episode.closed or not 0 < episode.scale_after <= episode.scale / FAR:
        return []
    doublings = round(math.log2(episode.scale / episode.scale_after))
    text = (
        f"It left the loss scale at {texts.power(episode.scale_after)}: growing back to {texts.power(episode.scale)} takes "
        f"about {doublings * interval} clean attempts, and small gradients may underflow meanwhile."
    )
    return [Evidence(text=text, value=doublings * interval, unit="attempts", attempt=episode.closed.attempt)]


def gradients_at_first(case: Case, episode: Episode) -> list[Evidence]:
    """Which gradients held inf or NaN in the first attempt of an episode, whose loss was finite."""
    if episode.first_nonfinite == episode.first:
        return []
    skips = case.described.skips.between(episode.first.attempt, episode.first.attempt)
    told = next((e for e in skips if e.data.get("tensors") and max(e.stream, 0) == case.index), None)
    if told is None:
        return []
    data = told.data
    names = [case.described.name_of(tensor) for tensor in data["tensors"]]
    count = int(data.get("count") or len(names))
    text = (
        f"At {texts.at(episode.first)} {texts.times(count, 'gradient')} held inf or NaN ({data.get('n_inf', 0)} inf, "
        f"{data.get('n_nan', 0)} NaN in all): {', '.join(names[:NAMED])}{', …' if count > NAMED else ''}."
    )
    return [Evidence(text=text, value=count, attempt=episode.first.attempt, tensor=names[0])]


def loss_before(episode: Episode) -> list[Evidence]:
    """The median loss of the attempts before."""
    if not math.isfinite(episode.loss_before):
        return []
    text = f"The loss before was {episode.loss_before:.4g} (median)."
    return [Evidence(text=text, value=episode.loss_before, attempt=episode.first.attempt)]


def recovery(episode: Episode, *, certain: bool) -> str:
    """Whether it has recovered, never will, or is not known yet."""
    if episode.closed:
        return texts.RECOVERY["recovered"].format(closed=texts.at(episode.closed))
    if episode.unskipped:
        return texts.RECOVERY["taken"]
    return texts.RECOVERY["never" if certain else "unknown"]
