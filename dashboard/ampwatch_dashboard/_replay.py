"""The path of a replayed loss scale over that of the recorded one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ._theme import PALETTES, Figure, Palette, Theme, axis, base_layout

Json = Mapping[str, Any]

_FLAT: Final = 5  # binades
_NAMES: Final = {"worst": "at worst", "best": "at best", "likely": "this setting, likely"}


def replay(replayed: Json, theme: Theme) -> Figure:
    """Loss scale (log2) over attempts: as recorded, and as the setting would have moved it, with both bounds.

    Arguments:
        replayed: `Replay` of docs/rest.md.
        theme: colours.
    """
    palette = PALETTES[theme]
    cases = replayed["replayed"]
    traces = [
        _line("as recorded", replayed["recorded"]["path"], palette.muted, width=1.5, dash="solid"),
        _line(_NAMES["worst"], cases["worst"]["path"], palette.marks["skip"], width=1, dash="dot"),
        _line(_NAMES["best"], cases["best"]["path"], palette.marks["growth"], width=1, dash="dot"),
        _line(_NAMES["likely"], cases["likely"]["path"], palette.streams[0], width=2, dash="solid"),
    ]
    heights = [y for trace in traces for y in trace["y"] if y is not None]
    return {"data": traces, "layout": _layout(palette, heights)}


def _line(name: str, path: Json, colour: str, *, width: float, dash: str) -> dict[str, Any]:
    """A step line through the highest and the lowest scale of each stretch."""
    attempts, heights = [], []
    for attempt, low, high in zip(path["attempt"], path["low"], path["high"], strict=True):
        for scale in (low,) if low == high else (high, low):
            attempts.append(attempt)
            heights.append(_height(scale))
    return {
        "type": "scattergl" if len(attempts) > 5000 else "scatter",
        "mode": "lines",
        "name": name,
        "x": attempts,
        "y": heights,
        "line": {"color": colour, "width": width, "dash": dash, "shape": "hv"},
        "hovertemplate": f"attempt %{{x:,}}<br>2^%{{y:.1f}}<extra>{name}</extra>",
        "connectgaps": False,
    }


def _height(scale: Any) -> float | None:
    """log2 of a scale; None for 0 and infinity, which have no place on the axis."""
    return math.log2(scale) if isinstance(scale, (int, float)) and 0 < scale < math.inf else None


def _ticks(heights: Sequence[float]) -> dict[str, Any]:
    """Whole binades, also where the scale hardly moves."""
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    return {"range": [low - 1, high + 1], "dtick": 1} if high - low < _FLAT else {}


def _layout(palette: Palette, heights: Sequence[float]) -> dict[str, Any]:
    return base_layout(palette) | {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "xaxis": axis(palette, "attempt", rangemode="nonnegative"),
        "yaxis": axis(palette, "log2 of the loss scale", tickformat="d", **_ticks(heights)),
    }
