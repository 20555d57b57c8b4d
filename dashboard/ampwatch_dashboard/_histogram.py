"""The histogram of one tensor over time: how its scaled gradient lies within the range of float16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ._text import NOWHERE, moment_text, scale_text
from ._theme import PALETTES, Figure, Palette, Theme, axis, base_layout, color_bar

Json = Mapping[str, Any]

LIMITS: Final = (
    (16, "largest float16, 65504"),
    (-14, "smallest normal, 2<sup>−14</sup>"),
    (-24, "smallest subnormal, 2<sup>−24</sup>"),
)
_MARGIN_BINS: Final = 2  # empty bins shown around the filled ones and the limits
_LEAST: Final = 1e-5  # share of elements at the dark end of the ramp


def histogram(histograms: Json, theme: Theme, begins: Mapping[str, int] = NOWHERE) -> Figure:
    """Attempts × bins of log2|scaled gradient|, coloured by the share of the non-zero finite elements in the bin.

    Arguments:
        histograms: the answer of `/tensors/{id}/histograms` in docs/rest.md; bin b holds 2^b <= |s| < 2^(b+1).
        theme: colours.
        begins: by producer, how many attempts the processes of its rank have made before it.

    Lines mark the limits of float16. Empty bins stay blank.
    """
    palette = PALETTES[theme]
    bins: Sequence[int] = histograms["bins_log2"]
    shares = [_shares(counts) for counts in histograms["hist"]]
    filled = [b for b in range(len(bins)) if any(row[b] is not None for row in shares)]
    before = begins.get(histograms["producer"], 0) if begins else 0
    trace = {
        "type": "heatmap",
        "x": [before + attempt for attempt in histograms["attempt"]],
        "y": [b + 0.5 for b in bins],
        "z": [[_log10(row[b]) for row in shares] for b in range(len(bins))],
        "text": [[_text(histograms, i, b, row[b]) for i, row in enumerate(shares)] for b in range(len(bins))],
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "colorscale": "Cividis",
        "zmin": math.log10(_LEAST),
        "zmax": math.log10(max((n for row in shares for n in row if n), default=1.0)),
        "colorbar": _bar(palette),
    }
    return {"data": [trace], "layout": _layout([bins[b] for b in filled], palette)}


def _shares(counts: Sequence[int]) -> list[float | None]:
    total = sum(counts)
    return [n / total if n > 0 else None for n in counts]


def _log10(share: float | None) -> float | None:
    return None if share is None else math.log10(share)


def _text(histograms: Json, i: int, b: int, share: float | None) -> str:
    if share is None:
        return ""
    low = histograms["bins_log2"][b]
    moment = moment_text(histograms["step"][i], histograms["attempt"][i])
    return (
        f"<b>{100 * share:.3g} %</b> of non-zero elements ({histograms['hist'][i][b]:,})<br>"
        f"2<sup>{low}</sup> ≤ |scaled gradient| &lt; 2<sup>{low + 1}</sup><br>"
        f"scale {scale_text(histograms['scale'][i])}<br>{moment}"
    )


def _bar(palette: Palette) -> dict[str, Any]:
    powers = range(round(math.log10(_LEAST)), 0)
    texts = [f"10<sup>−{-k}</sup>" for k in powers]
    return color_bar(palette, "share of non-zero elements") | {
        "tickvals": [*powers, 0],
        "ticktext": [*texts, "1"],
    }


def _layout(filled: Sequence[int], palette: Palette) -> dict[str, Any]:
    shown = [*filled, *(at for at, _ in LIMITS)]
    return base_layout(palette) | {
        "margin": {"l": 56, "r": 16, "t": 8, "b": 48},
        "hovermode": "closest",
        "xaxis": axis(palette, "attempt", tickformat=",d", showgrid=False, automargin=False),
        "yaxis": axis(
            palette,
            "|scaled gradient|",
            range=[min(shown) - _MARGIN_BINS, max(shown) + _MARGIN_BINS],
            fixedrange=True,
            tickprefix="2<sup>",
            ticksuffix="</sup>",
            dtick=8,
            tick0=0,
        ),
        "shapes": [_limit_line(at, palette) for at, _ in LIMITS],
        "annotations": [_limit_label(at, text, palette) for at, text in LIMITS],
    }


def _limit_line(at: int, palette: Palette) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": at,
        "y1": at,
        "line": {"color": palette.marks["skip"], "width": 1, "dash": "dot"},
    }


def _limit_label(at: int, text: str, palette: Palette) -> dict[str, Any]:
    return {
        "text": text,
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": at,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11, "color": palette.ink},
    }
