"""Colours and the layout that all figures share, for light and dark pages.

Marks take the palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), told apart by shape too. Heatmaps of
something bad use one ramp of rising contrast to the page, so that a healthy run looks calm: like cividis it is
monotone in luminance, which is what makes a ramp safe for the colour-blind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Theme = Literal["light", "dark"]
Figure: TypeAlias = dict[str, Any]
"""`{"data": [...], "layout": {...}}`, JSON-ready."""

FONT: Final = (
    'ui-sans-serif, -apple-system, "Segoe UI Variable Text", "Segoe UI", Inter, Roboto, "Noto Sans", '
    '"Helvetica Neue", Arial, sans-serif'
)


@dataclass(frozen=True)
class Palette:
    """Colours of one theme, as CSS colours."""

    ink: str
    muted: str
    grid: str
    surface: str
    border: str
    streams: tuple[str, ...]  # lines, cycled; none of them is the colour of a mark
    runs: tuple[str, ...]  # lines of runs that are compared, where there are no marks; Okabe and Ito
    marks: dict[str, str]  # by event type, and "nan", "inf"
    severities: dict[str, str]
    badness: tuple[tuple[float, str], ...]  # from "nothing wrong" to "all of it"


LIGHT: Final = Palette(
    ink="#1c2430",
    muted="#5b6675",
    grid="#e9edf2",
    surface="#ffffff",
    border="#d6dce4",
    streams=("#0072b2", "#7b4f9e", "#3a4656", "#2f9bd8"),
    runs=("#0072b2", "#d55e00", "#009e73", "#a8447f", "#c98500", "#3a4656"),
    marks={
        "skip": "#d55e00",
        "growth": "#009e73",
        "backoff": "#c98500",
        "set": "#0072b2",
        "restored": "#0072b2",
        "nan": "#d55e00",
        "inf": "#a8447f",
    },
    severities={"fatal": "#d55e00", "error": "#a8447f", "warning": "#e69f00", "info": "#8a95a5"},
    badness=((0.0, "#eff3f7"), (0.15, "#fbe6c0"), (0.3, "#f0b13f"), (0.6, "#d55e00"), (1.0, "#6b2500")),
)
DARK: Final = Palette(
    ink="#e6eaf0",
    muted="#9aa5b4",
    grid="#262d37",
    surface="#161b22",
    border="#323b47",
    streams=("#56b4e9", "#c9a0e8", "#b8c2cf", "#2f86c1"),
    runs=("#56b4e9", "#ff7f3f", "#2fc79a", "#e59ac4", "#f0b429", "#b8c2cf"),
    marks={
        "skip": "#ff7f3f",
        "growth": "#2fc79a",
        "backoff": "#f0b429",
        "set": "#56b4e9",
        "restored": "#56b4e9",
        "nan": "#ff7f3f",
        "inf": "#e59ac4",
    },
    severities={"fatal": "#ff7f3f", "error": "#e59ac4", "warning": "#f0b429", "info": "#8a95a5"},
    badness=((0.0, "#1e252e"), (0.15, "#4a3517"), (0.3, "#9a5a10"), (0.6, "#f08a24"), (1.0, "#ffe2a8")),
)
PALETTES: Final[dict[Theme, Palette]] = {"light": LIGHT, "dark": DARK}


def base_layout(palette: Palette) -> dict[str, Any]:
    """Layout keys that every figure has. `uirevision` keeps zoom and legend choices over `Plotly.react`."""
    return {
        "autosize": True,
        "uirevision": "keep",
        "paper_bgcolor": palette.surface,
        "plot_bgcolor": palette.surface,
        "font": {"family": FONT, "size": 12, "color": palette.muted},
        "hoverlabel": {
            "bgcolor": palette.surface,
            "bordercolor": palette.border,
            "font": {"family": FONT, "size": 12, "color": palette.ink},
            "align": "left",
            "namelength": -1,
        },
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": palette.muted,
            "activecolor": palette.streams[0],
            "orientation": "h",
        },
    }


def axis(palette: Palette, title: str = "", **more: Any) -> dict[str, Any]:
    """One axis: quiet grid, no zero line, a short title."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": palette.muted}},
        "gridcolor": palette.grid,
        "linecolor": palette.border,
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        **more,
    }


def color_bar(palette: Palette, title: str) -> dict[str, Any]:
    """A thin colour bar above the upper left corner of the plot."""
    return {
        "title": {"text": title, "side": "top", "font": {"size": 12, "color": palette.muted}},
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "ypad": 8,
        "len": 0.45,
        "thickness": 8,
        "outlinewidth": 0,
    }
