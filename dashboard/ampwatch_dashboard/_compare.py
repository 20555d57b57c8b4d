"""Several runs over each other: a colour for each, scale, loss and norm on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ._text import NOWHERE, escape, shorten
from ._theme import PALETTES, Figure, Palette, Theme
from ._timeline import PANELS, SCALE, Panel, base_panels, placed_stream, stream_traces

Json = Mapping[str, Any]

_LABEL: Final = 40  # letters of a run's name in the legend


def compare(comparison: Json, theme: Theme, begins: Mapping[str, int] = NOWHERE) -> Figure:
    """Scale (log2), loss and norm of several runs over attempts.

    Arguments:
        comparison: `Comparison` of docs/rest.md whose series have the names `scale`, `loss` and `norm`.
        theme: colours.
        begins: by producer, how many attempts the processes of its rank have made before it.

    Of each run the lowest rank is drawn: every rank of a run has the same scale, and its loss differs little. Runs
    are told apart by colour and by dashes; the legend switches a run in all panels.
    """
    palette = PALETTES[theme]
    runs = [_streams(series, begins) for series in comparison["series"]]
    labels = [escape(shorten(run["name"] or run["run"], _LABEL)) for run in comparison["runs"]]
    data = [trace for panel in PANELS for trace in _panel_traces(panel, runs, labels, palette)]
    return {"data": data, "layout": base_panels([s for streams in runs for s in streams], palette)}


def _streams(series: Json, begins: Mapping[str, int]) -> list[Json]:
    lowest = min((stream["rank"] for stream in series["streams"]), default=0)
    return [placed_stream(s, begins) for s in series["streams"] if s["rank"] == lowest]


def _panel_traces(
    panel: Panel, runs: Sequence[Sequence[Json]], labels: Sequence[str], palette: Palette
) -> Iterator[dict[str, Any]]:
    for i, (streams, label) in enumerate(zip(runs, labels, strict=True)):
        color = palette.runs[i % len(palette.runs)]
        dash = "solid" if i < len(palette.runs) else "dash"
        for j, stream in enumerate(streams):
            for trace in stream_traces(panel, stream, label, color):
                first = panel is SCALE and j == 0 and trace["showlegend"]
                look = {"legendgroup": str(i), "showlegend": first}
                yield trace | look | {"line": trace["line"] | {"dash": dash}}
