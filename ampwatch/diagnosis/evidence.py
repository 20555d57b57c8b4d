"""What several rules say of an episode in the same words."""

from __future__ import annotations

import math
from typing import Final

from . import texts
from .episodes import Episode
from .findings import Evidence

FAR: Final = 16.0  # times below where it was


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
