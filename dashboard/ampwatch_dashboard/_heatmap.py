"""The heatmap: one statistic of every tensor over time."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._text import NOWHERE, escape, finite, shorten
from ._theme import PALETTES, Figure, Palette, Theme, axis, base_layout, color_bar

Json = Mapping[str, Any]
Array = NDArray[Any]

_ROW_PX: Final = 18
_MOST_BINADES: Final = 1000.0  # a factor of more overflows
_FEW_DECADES: Final = 2
_MOST_TICKS: Final = 5  # of a colour bar, which is narrow on a phone
_FRAME_PX: Final = 96  # margins above and below the rows
# A trace for the first y axis, which would not be drawn without one.
_NOTHING: Final = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip", "showlegend": False}
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

    The row's number is its place in `heatmap["tensors"]`, whose ids are in `layout.meta.tensors`. Columns in which nothing
    was recorded are left out, so that samples taken every 25 attempts stand side by side. `layout.height` is in pixels.

    What stands under the pointer is put together there: of each cell its numbers are sent, and what is said of a tensor
    once, as the labels of a second y axis, on which the cells lie and which is not shown.
    """
    palette = PALETTES[theme]
    stat = STATS.get(heatmap["stat"]) or Stat(escape(heatmap["stat"]), "magnitude")
    kept = _recorded_columns(heatmap["values"], len(heatmap["attempt"]))
    values = _numbers(heatmap["values"], kept)
    colored = _colored(stat, values)
    moments = [_moment(heatmap["step"][c], heatmap["attempt"][c]) for c in kept]
    told = np.empty((*values.shape, 3))
    told[..., 0], told[..., 1:] = _told(stat, values), np.reshape(moments, (-1, 2))
    before = next((begins.get(tensor["producer"], 0) for tensor in heatmap["tensors"]), 0) if begins else 0
    cells = {
        "type": "heatmap",
        "x": [before + attempt for _, attempt in moments],
        "y": list(range(len(values))),
        "yaxis": "y2",
        "z": _packed(colored.astype("<f4")),
        "customdata": _packed(told.astype("<f8")),
        "hovertemplate": _template(stat, moments),
        "hoverongaps": False,
        "ygap": 1,
        **_coloring(stat, colored[~np.isnan(colored)].tolist(), palette),
    }
    return {"data": [cells, _NOTHING], "layout": _layout(heatmap["tensors"], palette)}


def _numbers(values: Sequence[Sequence[Any]], columns: Sequence[int]) -> Array:
    """Rows of numbers of the API at these columns; NaN where none is or it is not finite."""
    found = [[finite(row[c]) for c in columns] for row in values]
    return np.array(found, dtype=np.float64).reshape(len(values), len(columns))


def _packed(array: Array) -> dict[str, Any]:
    """An array in the form that plotly.js unpacks; NaN is left blank."""
    shape = ", ".join(map(str, array.shape))
    return {"dtype": array.dtype.str[1:], "bdata": b64encode(array.tobytes()).decode(), "shape": shape}


def _recorded_columns(values: Sequence[Sequence[Any]], columns: int) -> list[int]:
    return [c for c in range(columns) if any(row[c] is not None for row in values)]


def _moment(step: Any, attempt: int) -> tuple[int, int]:
    """Step and attempt; where no step was told, attempts are steps."""
    return (step if isinstance(step, int) and step >= 0 else attempt), attempt


def _tensor_text(tensor: Json) -> str:
    name = f"<b>{escape(tensor['name'])}</b><br>"
    if tensor["shape"] is None:
        return name + "its description has not arrived"
    shape = " × ".join(f"{n:,}" for n in tensor["shape"]) or "scalar"
    return name + escape(
        ", ".join([tensor["module_type"] or "parameter", shape, tensor["dtype"] or "dtype unknown"])
    )


def _template(stat: Stat, moments: Sequence[tuple[int, int]]) -> str:
    """What stands under the pointer: the tensor, its value with unit, and the moment, as the user counts it."""
    moment = "step %{customdata[1]:,d}"
    if any(step != attempt for step, attempt in moments):
        moment += " (attempt %{customdata[2]:,d})"
    return f"%{{y}}<br>{stat.title}: {_WRITTEN[stat.kind]}<br>{moment}<extra></extra>"


_WRITTEN: Final = {
    "share": "%{customdata[0]:.3~g} % of elements",
    "binades": "%{z:.2f} binades (a factor of %{customdata[0]:,.4~g})",
    "magnitude": "%{customdata[0]:,.4~g}",
    "count": "%{customdata[0]:,.0f} elements",
}


def _told(stat: Stat, values: Array) -> Array:
    """The numbers that are written of values."""
    if stat.kind == "share":
        return 100 * values
    return np.exp2(np.minimum(values, _MOST_BINADES)) if stat.kind == "binades" else values


def _colored(stat: Stat, values: Array) -> Array:
    """Values on the colour axis, which is logarithmic where they span decades."""
    if stat.kind == "magnitude":
        return np.log10(np.where(values > 0, values, np.nan))
    return np.log10(1 + values) if stat.kind == "count" else values


def _coloring(stat: Stat, values: Sequence[float], palette: Palette) -> dict[str, Any]:
    """Colour scale, its ends and its bar, for values on the colour axis."""
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
    rows: dict[str, Any] = {
        "range": [len(tensors) - 0.5, -0.5],
        "fixedrange": True,
        "tickvals": list(range(len(tensors))),
    }
    return base_layout(palette) | {
        "meta": {
            "tensors": [tensor["id"] for tensor in tensors],
            "short_names": [escape(shorten(tensor["name"], 18, head=8)) for tensor in tensors],
        },
        "height": _FRAME_PX + _ROW_PX * max(3, len(tensors)),
        "margin": {"l": 24, "r": 16, "t": 8, "b": 48},
        "hovermode": "closest",
        "xaxis": axis(palette, "attempt", tickformat=",d", showgrid=False, automargin=False),
        "yaxis": axis(
            palette,
            **rows,
            showgrid=False,
            ticktext=[escape(shorten(tensor["name"])) for tensor in tensors],
            tickfont={"size": 11, "color": palette.muted},
        ),
        "yaxis2": rows
        | {
            "overlaying": "y",
            "ticktext": [_tensor_text(tensor) for tensor in tensors],
            "showticklabels": False,
            "showgrid": False,
            "zeroline": False,
        },
    }
