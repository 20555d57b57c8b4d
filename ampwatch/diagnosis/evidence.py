"""What several rules say of an episode in the same words."""

from __future__ import annotations

import math

from . import texts
from .episodes import Episode
from .findings import Evidence


def to_no_avail(episode: Episode) -> list[Evidence]:
    """How far the scale fell while the loss stayed as it was."""
    if not 0 < episode.scale_after < episode.scale:
        return []
    halvings = round(math.log2(episode.scale / episode.scale_after))
    path = f"from {texts.power(episode.scale)} to {texts.power(episode.scale_after)}"
    text = f"The loss scale was halved {texts.times(halvings, 'time')}, {path}, to no avail: the scale is not the cause."
    return [Evidence(text=text, value=halvings, attempt=episode.last.attempt)]


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
