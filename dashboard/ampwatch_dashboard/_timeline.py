"""The timeline: loss scale with its events, loss and gradient norm, above each other on one axis of attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._marks import event_traces, nonfinite_traces
from ._shapes import add_seams, finding_shapes, placed_finding
from ._text import NOWHERE, ZERO_HEIGHT, escape, finite, moment_text, number_text, scale_height, scale_text
from ._theme import PALETTES, Figure, Palette, Theme, axis, base_layout

Json = Mapping[str, Any]

_LOG_FROM_RATIO: Final = 50.0  # a panel whose largest value is this many times its smallest gets a log axis
_SHORT: Final = 80  # up to so many points each one gets a dot, so that one between two gaps is seen
_DECADE_TICKS: Final = 4  # of a log axis; between powers of ten there are none
_SCALE_TICKS: Final = 5
_TICK_STEPS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # binades; float64 has 2,098


@dataclass(frozen=True)
class Panel:
    """One plot of the stack: the series it shows, its y axis and the share of the height it takes."""

    name: str
    title: str
    yaxis: str
    domain: tuple[float, float]

    @property
    def layout_key(self) -> str:
        """Key of its y axis in a layout."""
        return self.yaxis.replace("y", "yaxis")


SCALE: Final = Panel("scale", "loss scale", "y", (0.66, 1.0))
LOSS: Final = Panel("loss", "loss", "y2", (0.34, 0.6))
NORM: Final = Panel("norm", "gradient norm (L2)", "y3", (0.0, 0.27))
PANELS: Final = (SCALE, LOSS, NORM)


def timeline(
    series: Json,
    events: Iterable[Json],
    findings: Iterable[Json],
    theme: Theme,
    begins: Mapping[str, int] = NOWHERE,
) -> Figure:
    """Scale (log2), loss and norm over attempts, events and findings marked.

    Arguments:
        series: `Series` of docs/rest.md with the names `scale`, `loss` and `norm`, as far as there are any.
        events: `Event`s; those that changed the scale, and the skips, are drawn, each kind by its own mark.
        findings: `Finding`s; each is a band over all panels, named by its key.
        theme: colours.
        begins: by producer, how many attempts the processes of its rank have made before it: each is drawn behind
            the one before, with a seam between them.

    Where a point covers several attempts, its smallest and largest value span a band and the line is the mean:
    a spike of one attempt stays visible. Where a loss was NaN or infinite a mark stands at the top.
    """
    palette = PALETTES[theme]
    streams: Sequence[Json] = [placed_stream(stream, begins) for stream in series["streams"]]
    data = [trace for panel in PANELS for trace in _panel_traces(panel, streams, palette)]
    data += nonfinite_traces(streams, palette)
    data += event_traces(events, palette, begins)
    layout = _layout(streams, [placed_finding(finding, begins) for finding in findings], palette)
    add_seams(layout, streams, palette)
    return {"data": data, "layout": layout}


def placed_stream(stream: Json, begins: Mapping[str, int]) -> Json:
    """A stream with `x`, where its attempts stand on the axis, and `begins`."""
    before = begins.get(stream["producer"], 0)
    return {**stream, "begins": before, "x": [before + attempt for attempt in stream["attempt"]]}


def _panel_traces(panel: Panel, streams: Sequence[Json], palette: Palette) -> Iterator[dict[str, Any]]:
    """The streams of a panel; those of the processes of one rank look alike and are told once."""
    lines = list(dict.fromkeys((stream["rank"], stream["stream"]) for stream in streams))
    told: set[int] = set()
    for stream in streams:
        index = lines.index((stream["rank"], stream["stream"]))
        color = palette.streams[index % len(palette.streams)]
        for trace in stream_traces(panel, stream, _label(stream, streams), color):
            yield trace | {"showlegend": trace["showlegend"] and index not in told}
        told.add(index)


def _label(stream: Json, streams: Sequence[Json]) -> str:
    """What tells this stream from the others: only the parts that differ between them."""
    parts = {"rank": "rank {}", "stream": "stream {}"}
    told = [
        text.format(stream[key]) for key, text in parts.items() if len({other[key] for other in streams}) > 1
    ]
    return escape(", ".join(told))


def stream_traces(panel: Panel, stream: Json, label: str, color: str) -> Iterator[dict[str, Any]]:
    """The line of a stream (of `placed_stream`) in a panel, and the span of its points where they cover several."""
    column = stream["series"].get(panel.name)
    if column is None:
        return
    if stream["stride"] > 1:
        yield _envelope(panel, stream, column, color, label)
    yield _line(panel, stream, column, color, label)


def _plotted(panel: Panel, values: Iterable[Any]) -> list[float | None]:
    return [scale_height(v) if panel is SCALE else finite(v) for v in values]


def _line(panel: Panel, stream: Json, column: Json, color: str, label: str) -> dict[str, Any]:
    y = _plotted(panel, column["mean"])
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(y) <= _SHORT else "lines",
        "name": label or panel.title,
        "legendgroup": label,
        "showlegend": bool(label) and panel is SCALE,
        "x": list(stream["x"]),
        "y": y,
        "xaxis": "x",
        "yaxis": panel.yaxis,
        "line": {"color": color, "width": 1.6, "shape": "hv" if panel is SCALE else "linear"},
        "marker": {"color": color, "size": 4},
        "text": [_hover(panel, stream, column, i, label) for i in range(len(y))],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover(panel: Panel, stream: Json, column: Json, i: int, label: str) -> str:
    show = scale_text if panel is SCALE else number_text
    moment = moment_text(stream["step"][i], stream["attempt"][i])
    lines = [f"<b>{panel.title}</b> {show(column['mean'][i])}"]
    if stream["stride"] > 1:
        lines[0] = f"<b>{panel.title}</b> mean {number_text(column['mean'][i])}"
        lines.append(
            f"{show(column['min'][i])} … {show(column['max'][i])} over {stream['stride']:,} attempts"
        )
    process = [f"process {stream['producer'][:6]}"] if stream["begins"] else []
    return "<br>".join([*lines, *([label] if label else []), *process, moment])


def _envelope(panel: Panel, stream: Json, column: Json, color: str, label: str) -> dict[str, Any]:
    """The span from min to max: one closed polygon for each stretch without a gap."""
    low, high = _plotted(panel, column["min"]), _plotted(panel, column["max"])
    x: list[float | None] = []
    y: list[float | None] = []
    for first, end in _stretches(low):
        at = list(stream["x"][first:end])
        at.append(at[-1] + stream["stride"])
        x += [*at, *reversed(at), at[0], None]
        top, bottom = high[first:end], low[first:end]
        y += [*top, top[-1], bottom[-1], *reversed(bottom), top[0], None]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label or panel.title,
        "legendgroup": label,
        "showlegend": False,
        "x": x,
        "y": y,
        "xaxis": "x",
        "yaxis": panel.yaxis,
        "fill": "toself",
        "opacity": 0.35,
        "line": {"color": color, "width": 1},
        "hoverinfo": "skip",
    }


def _stretches(values: Sequence[float | None]) -> Iterator[tuple[int, int]]:
    """First and end index of each stretch of values without a None."""
    first = None
    for i, value in enumerate([*values, None]):
        if value is not None and first is None:
            first = i
        elif value is None and first is not None:
            yield first, i
            first = None


def _layout(streams: Sequence[Json], findings: list[Json], palette: Palette) -> dict[str, Any]:
    layout = base_panels(streams, palette)
    shapes, annotations = finding_shapes(findings, palette)
    overlay = {"yaxis4": {"overlaying": "y2", "range": [0, 1], "visible": False, "fixedrange": True}}
    return layout | overlay | {"shapes": shapes, "annotations": [*annotations, *layout["annotations"]]}


def base_panels(streams: Sequence[Json], palette: Palette) -> dict[str, Any]:
    """The layout of the panels above each other, their axes as the streams need them."""
    layout = base_layout(palette) | {
        "margin": {"l": 56, "r": 16, "t": 56, "b": 40},
        "hovermode": "closest",
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.05, "yanchor": "bottom", "itemsizing": "constant"},
        "xaxis": axis(palette, "attempt", anchor="y3", domain=[0, 1], tickformat=",d", showspikes=True)
        | {"spikemode": "across", "spikethickness": 1, "spikedash": "solid", "spikecolor": palette.border},
        "shapes": [],
        "annotations": [_panel_title(panel, palette) for panel in PANELS],
    }
    layout[SCALE.layout_key] = _scale_axis(streams, palette)
    for panel in (LOSS, NORM):
        layout[panel.layout_key] = _value_axis(panel, streams, palette)
    return layout


def _panel_title(panel: Panel, palette: Palette) -> dict[str, Any]:
    """The panel's name at its upper left: shorter to read there than turned along the axis."""
    return {
        "text": panel.title,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "xanchor": "left",
        "y": panel.domain[1],
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": palette.ink},
    }


def _values(panel: Panel, streams: Sequence[Json]) -> list[float]:
    columns = [s["series"][panel.name] for s in streams if panel.name in s["series"]]
    both = (value for column in columns for end in ("min", "max") for value in _plotted(panel, column[end]))
    return [value for value in both if value is not None]


def _scale_axis(streams: Sequence[Json], palette: Palette) -> dict[str, Any]:
    """Powers of two as ticks, with room for the marks above and below the line."""
    values = _values(SCALE, streams) or [0.0]
    low, high = math.floor(min(values)), math.ceil(max(values))
    every = next(n for n in _TICK_STEPS if (high - low) / n <= _SCALE_TICKS)
    ticks = list(range(-(-(low - 1) // every) * every, high + 2, every))
    if low == ZERO_HEIGHT:
        ticks = [low, *(k for k in ticks if k - low > every / 2)]
    room = max(1.0, 0.12 * (high - low))
    return axis(
        palette,
        domain=list(SCALE.domain),
        fixedrange=True,
        range=[low - room, high + room],
        tickvals=ticks,
        ticktext=[_power(k) for k in ticks],
    )


def _power(exponent: int) -> str:
    return "0" if exponent == ZERO_HEIGHT else f"2<sup>{exponent}</sup>".replace("-", "−")


def _value_axis(panel: Panel, streams: Sequence[Json], palette: Palette) -> dict[str, Any]:
    values = _values(panel, streams)
    wide = bool(values) and min(values) > 0 and max(values) / min(values) >= _LOG_FROM_RATIO
    decades = math.log10(max(values) / min(values)) if wide else 0
    ticks: dict[str, Any] = {"dtick": math.ceil(decades / _DECADE_TICKS)} if wide else {"nticks": 5}
    return axis(
        palette,
        domain=list(panel.domain),
        fixedrange=True,
        type="log" if wide else "linear",
        exponentformat="power",
        **ticks,
    )
