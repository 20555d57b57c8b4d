"""The heatmap: one statistic of every tensor over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._text import NOWHERE, escape, finite, moment_text, number_text, shorten
from ._theme import PALETTES, Figure, Palette, Theme, axis, base_layout, color_bar

Json = Mapping[str, Any]

_ROW_PX: Final = 18
_FEW_DECADES: Final = 2
_MOST_TICKS: Final = 5  # of a colour bar, which is narrow on a phone
_FRAME_PX: Final = 96  # margins above and below the rows
_SMALLEST_SHARE: Final = (
    0.05  # the ramp of a share spans at least this, so that dust does not look like a fire
)


@dataclass(frozen=True)
class Stat:
    """How one statistic is coloured and written.

    Arguments:
        title: what the colour bar says.
        kind: `share` of elements, `binades` of headroom, `magnitude` or `count`.
    """

    title: str
    kind: str


STATS: Final = {
    "lost_share": Stat("lost to underflow (estimate)", "share"),
    "subnormal_share": Stat("subnormal in float16", "share"),
    "zero_share": Stat("exactly zero", "share"),
    "headroom_log2": Stat("headroom below 65504", "binades"),
    "norm": Stat("gradient norm (L2)", "magnitude"),
    "nonfinite": Stat("inf and NaN", "count"),
}


_BAR_UNITS: Final = {
    "share": ", share of elements",
    "binades": ", binades",
    "count": ", elements",
    "magnitude": "",
}


def heatmap(heatmap: Json, theme: Theme, begins: Mapping[str, int] = NOWHERE) -> Figure:
    """Tensors (rows) × attempts (columns), the worst of each column.

    Arguments:
        heatmap: `Heatmap` of docs/rest.md.
        theme: colours.
        begins: by producer, how many attempts the processes of its rank have made before it.

    The row's number is its place in `heatmap["tensors"]`, whose id is in `customdata`. Columns in which nothing was
    recorded are left out, so that samples taken every 25 attempts stand side by side. `layout.height` is in pixels.
    """
    palette = PALETTES[theme]
    stat = STATS.get(heatmap["stat"]) or Stat(escape(heatmap["stat"]), "magnitude")
    kept = _recorded_columns(heatmap["values"], len(heatmap["attempt"]))
    rows = [[finite(row[c]) for c in kept] for row in heatmap["values"]]
    moments = [(heatmap["step"][c], heatmap["attempt"][c]) for c in kept]
    ends = [f"<br>{moment_text(step, attempt)}" for step, attempt in moments]
    before = next((begins.get(tensor["producer"], 0) for tensor in heatmap["tensors"]), 0) if begins else 0
    trace = {
        "type": "heatmap",
        "x": [before + attempt for _, attempt in moments],
        "y": list(range(len(rows))),
        "z": [[_colored(stat, value) for value in row] for row in rows],
        "customdata": [[tensor["id"]] * len(kept) for tensor in heatmap["tensors"]],
        "text": [_row_texts(t, row, ends, stat) for t, row in zip(heatmap["tensors"], rows, strict=True)],
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "ygap": 1,
        **_coloring(stat, rows, palette),
    }
    return {"data": [trace], "layout": _layout(heatmap["tensors"], palette)}


def _recorded_columns(values: Sequence[Sequence[Any]], columns: int) -> list[int]:
    return [c for c in range(columns) if any(row[c] is not None for row in values)]


def _row_texts(tensor: Json, row: Sequence[float | None], ends: Sequence[str], stat: Stat) -> list[str]:
    begin = f"<b>{escape(tensor['name'])}</b><br>{_tensor_text(tensor)}<br>{stat.title}: "
    return [begin + value_text(stat, value) + end for value, end in zip(row, ends, strict=True)]


def _tensor_text(tensor: Json) -> str:
    if tensor["shape"] is None:
        return "its description has not arrived"
    shape = " × ".join(f"{n:,}" for n in tensor["shape"]) or "scalar"
    return escape(
        ", ".join([tensor["module_type"] or "parameter", shape, tensor["dtype"] or "dtype unknown"])
    )


def value_text(stat: Stat, value: float | None) -> str:
    """A value of the statistic with its unit."""
    return "not recorded" if value is None else _WRITTEN[stat.kind](value)


_WRITTEN: Final[dict[str, Callable[[float], str]]] = {
    "share": lambda v: f"{100 * v:.3g} % of elements",
    "binades": lambda v: f"{v:.2f} binades (a factor of {number_text(2**v)})",
    "magnitude": number_text,
    "count": lambda v: f"{v:,.0f} elements",
}


def _colored(stat: Stat, value: float | None) -> float | None:
    """The value on the colour axis: logarithmic where it spans decades."""
    if value is None or (stat.kind == "magnitude" and value <= 0):
        return None
    if stat.kind == "magnitude":
        return math.log10(value)
    return math.log10(1 + value) if stat.kind == "count" else value


def _coloring(stat: Stat, rows: Sequence[Sequence[float | None]], palette: Palette) -> dict[str, Any]:
    """Colour scale, its ends and its bar."""
    values = [z for row in rows for z in (_colored(stat, value) for value in row) if z is not None]
    top = max(values, default=1.0)
    ramp = [list(stop) for stop in palette.badness]
    bar = color_bar(palette, stat.title + _BAR_UNITS[stat.kind])
    if stat.kind == "share":
        return {
            "colorscale": ramp,
            "zmin": 0,
            "zmax": max(_SMALLEST_SHARE, top),
            "colorbar": bar | {"tickformat": ".0%"},
        }
    if stat.kind == "binades":  # none left is the worst
        turned = [[1 - at, color] for at, color in reversed(palette.badness)]
        return {"colorscale": turned, "zmin": 0, "zmax": max(1.0, top), "colorbar": bar}
    if stat.kind == "count":
        return {
            "colorscale": ramp,
            "zmin": 0,
            "zmax": max(1.0, top),
            "colorbar": bar | _decades(0, top, offset=1),
        }
    return {"colorscale": "Cividis", "colorbar": bar | _decades(min(values, default=0.0), top)}


def _decades(low: float, high: float, offset: int = 0) -> dict[str, Any]:
    """Ticks at powers of ten of a colour axis that is log10(value + offset)."""
    crowded = offset > 0 and high > _FEW_DECADES  # 1 would stand on top of 0
    powers = range(1 if crowded else math.floor(low), math.ceil(high) + 1)
    powers = powers[:: -(-len(powers) // _MOST_TICKS)]
    at = [math.log10(10.0**k + offset) for k in powers]
    texts = [f"10<sup>{k}</sup>".replace("-", "−") for k in powers]
    return (
        {"tickvals": [0, *at], "ticktext": ["0", *texts]} if offset else {"tickvals": at, "ticktext": texts}
    )


def _layout(tensors: Sequence[Json], palette: Palette) -> dict[str, Any]:
    return base_layout(palette) | {
        "meta": {"short_names": [escape(shorten(tensor["name"], 18, head=8)) for tensor in tensors]},
        "height": _FRAME_PX + _ROW_PX * max(3, len(tensors)),
        "margin": {"l": 24, "r": 16, "t": 8, "b": 48},
        "hovermode": "closest",
        "xaxis": axis(palette, "attempt", tickformat=",d", showgrid=False, automargin=False),
        "yaxis": axis(
            palette,
            range=[len(tensors) - 0.5, -0.5],
            fixedrange=True,
            showgrid=False,
            tickvals=list(range(len(tensors))),
            ticktext=[escape(shorten(tensor["name"])) for tensor in tensors],
            tickfont={"size": 11, "color": palette.muted},
        ),
    }
