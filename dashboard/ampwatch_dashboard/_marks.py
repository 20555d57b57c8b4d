"""Marks of the timeline: what happened to the scale, and losses that are no number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ._text import NOWHERE, moment_text, number_text, scale_height, scale_text
from ._theme import Palette

Json = Mapping[str, Any]

SYMBOLS: Final = {
    "growth": "triangle-up",
    "backoff": "triangle-down",
    "set": "diamond",
    "restored": "star",
    "skip": "x-thin",  # last: drawn over the backoff that goes with it
}
NAMES: Final = {
    "skip": "skipped step",
    "growth": "growth",
    "backoff": "backoff",
    "set": "scale set",
    "restored": "scale restored",
}
_FEW: Final = 60
_TOP: Final = 0.93  # height in the loss panel of the marks for losses that have no height


def event_traces(
    events: Iterable[Json], palette: Palette, begins: Mapping[str, int] = NOWHERE
) -> list[dict[str, Any]]:
    """One trace for each kind of event; a skip stands at the scale that failed, a change at the scale it made.

    Where an event has `count` and `last_attempt` it stands for so many of its kind, itself the first; the text says so.
    """
    by_type: dict[str, list[Json]] = {}
    for event in events:
        if event["type"] in SYMBOLS:
            by_type.setdefault(event["type"], []).append(event)
    return [_event_trace(kind, by_type[kind], palette, begins) for kind in SYMBOLS if kind in by_type]


def _event_trace(
    kind: str, events: Sequence[Json], palette: Palette, begins: Mapping[str, int]
) -> dict[str, Any]:
    height = "scale" if kind == "skip" else "scale_after"
    total = sum(_count(event) for event in events)
    grouped = f" ({total:,}, close ones together)" if total > len(events) else ""
    color = palette.marks[kind]
    marker = {
        "symbol": SYMBOLS[kind],
        "size": _size(len(events)),
        "color": color,
        "line": {"color": color, "width": 0},
    }
    if kind == "skip":
        marker["line"] = {"color": color, "width": 2}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": NAMES[kind] + grouped,
        "x": [event["attempt"] + begins.get(event.get("producer", ""), 0) for event in events],
        "y": [scale_height(event["data"].get(height)) for event in events],
        "xaxis": "x",
        "yaxis": "y",
        "marker": marker,
        "text": [_event_text(event) for event in events],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _size(marks: int) -> float:
    """In pixels: smaller where there are many, so that a long run of skips stays a line of marks."""
    return 9 if marks <= _FEW else 6


def _count(event: Json) -> int:
    return int(event.get("count", 1))


def _event_text(event: Json) -> str:
    data = event["data"]
    lines = [
        f"<b>{NAMES[event['type']]}</b>, {moment_text(event['step'], event['attempt'])}",
        *_together(event),
        f"scale {scale_text(data.get('scale'))} → {scale_text(data.get('scale_after'))}",
    ]
    if event["type"] == "skip":
        lines.append(f"loss {number_text(data.get('loss'))}")
        lines.append(_elements_text(data))
    if event.get("repeat", 1) > 1:
        lines.append(f"the same {event['repeat']:,} times in a row")
    return "<br>".join(lines)


def _together(event: Json) -> list[str]:
    if _count(event) == 1:
        return []
    return [f"the first of {_count(event):,} up to attempt {event['last_attempt']:,}; zoom in to see each"]


def _elements_text(data: Json) -> str:
    inf, nan, tensors = (number_text(data.get(key)) for key in ("n_inf", "n_nan", "count"))
    return f"{inf} inf, {nan} NaN elements in {tensors} tensors"


def nonfinite_traces(streams: Sequence[Json], palette: Palette) -> list[dict[str, Any]]:
    """NaN and infinite losses, which no line can show, as two kinds of mark at the top of the loss panel."""
    kinds = (("nan", "loss is NaN", "diamond"), ("inf", "loss is infinite", "triangle-up-open"))
    traces = (_nonfinite_trace(streams, *kind, palette.marks[kind[0]]) for kind in kinds)
    return [trace for trace in traces if trace["x"]]


def _nonfinite_trace(streams: Sequence[Json], key: str, name: str, symbol: str, color: str) -> dict[str, Any]:
    points = [(s, i, n) for s in streams for i, n in enumerate(s["series"].get("loss", {}).get(key, ())) if n]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [s["x"][i] for s, i, _ in points],
        "y": [_TOP] * len(points),
        "xaxis": "x",
        "yaxis": "y4",
        "marker": {
            "symbol": symbol,
            "size": _size(len(points)) - 1,
            "color": color,
            "line": {"color": color, "width": 1},
        },
        "text": [
            f"<b>{name}</b> at {n:,} of {s['stride']:,} attempts<br>{moment_text(s['step'][i], s['attempt'][i])}"
            for s, i, n in points
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }
