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


def placed_finding(finding: Json, begins: Mapping[str, int]) -> Json:
    """A finding whose attempts are where its process stands on the axis."""
    before = begins.get(finding.get("producer", ""), 0)
    if before == 0 or finding["first_attempt"] < 0:
        return finding
    ends = {end: finding[end] + before for end in ("first_attempt", "last_attempt")}
    return {**finding, **ends}


def add_seams(layout: dict[str, Any], streams: Sequence[Json], palette: Palette) -> None:
    """A line where a process of the lowest rank follows another: a job that was resumed."""
    lowest = min((stream["rank"] for stream in streams), default=0)
    seams = {s["begins"]: s["producer"] for s in streams if s["rank"] == lowest and s["begins"] > 0}
    for at, producer in seams.items():
        line = {"color": palette.muted, "width": 1, "dash": "dash"}
        place = {"xref": "x", "yref": "paper"}
        layout["shapes"].append(
            {"type": "line", "x0": at - 0.5, "x1": at - 0.5, "y0": 0, "y1": 1, "line": line} | place
        )
        text = {"text": f"resumed, process {producer[:6]}", "font": {"size": 11, "color": palette.muted}}
        layout["annotations"].append(
            text | place | {"x": at, "xanchor": "left", "y": 1, "yanchor": "top", "showarrow": False}
        )


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
