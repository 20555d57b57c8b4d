"""Findings on the timeline: a band from their first to their last attempt, worst on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ._text import escape
from ._theme import Palette

Json = Mapping[str, Any]

_ORDER: Final = {"fatal": 0, "error": 1, "warning": 2, "info": 3}
_MOST: Final = 100  # more bands than this slow the browser and tell no more; the worst are kept


def finding_shapes(
    findings: Sequence[Json], palette: Palette
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bands, each with the finding's key as its name, and a label on the worst one that is above info."""
    ranked = sorted(findings, key=lambda f: (_ORDER[f["severity"]], f["first_attempt"]))[:_MOST]
    placed = [finding for finding in ranked if finding["first_attempt"] >= 0]
    bands = [_band(finding, palette) for finding in reversed(placed)]
    labels = [_label(f, palette) for f in placed[:1] if f["severity"] != "info"]
    return bands, labels


def _band(finding: Json, palette: Palette) -> dict[str, Any]:
    color = palette.severities[finding["severity"]]
    return {
        "type": "rect",
        "name": finding["key"],
        "xref": "x",
        "yref": "paper",
        "x0": finding["first_attempt"] - 0.5,
        "x1": max(finding["last_attempt"], finding["first_attempt"]) + 0.5,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "fillcolor": color,
        "opacity": 0.1 if finding["severity"] == "info" else 0.16,
        "line": {"width": 0},
    }


def _label(finding: Json, palette: Palette) -> dict[str, Any]:
    return {
        "text": escape(finding["kind"].replace("_", " ")),
        "xref": "x",
        "yref": "paper",
        "x": finding["first_attempt"],
        "xanchor": "left",
        "y": 0,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11, "color": palette.severities[finding["severity"]]},
    }
