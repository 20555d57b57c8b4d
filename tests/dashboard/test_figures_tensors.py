"""The heatmap and the histogram, with hand-worked values."""

from __future__ import annotations

import json
import math
from typing import Any

import plotly.graph_objects as go
import pytest

from ampwatch_dashboard import figures

Json = dict[str, Any]


def tensor(number: int, name: str) -> Json:
    described = {"module_type": "Linear", "shape": [64, 192], "dtype": "float32"}
    return {"id": number, "name": name} | described


def grid(stat: str, values: list[list[Any]]) -> Json:
    names = ["a.weight", "b.weight"]
    tensors = [tensor(10 + i, names[i]) for i in range(len(values))]
    return {
        "stat": stat,
        "unit": "",
        "tensors": tensors,
        "attempt": [0, 25, 50],
        "step": [0, 24, 49],
        "values": values,
    }


STATS = ["lost_share", "subnormal_share", "zero_share", "headroom_log2", "norm", "nonfinite"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("stat", STATS)
def test_heatmap_is_a_figure_that_plotly_accepts_and_json_can_hold(stat: str, theme: figures.Theme) -> None:
    figure = figures.heatmap(grid(stat, [[0.0, "NaN", 0.5], [1.0, None, "Infinity"]]), theme)
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    go.Figure(figure)


def test_columns_without_any_record_are_left_out() -> None:
    (trace,) = figures.heatmap(grid("zero_share", [[0.1, None, 0.3], [0.2, None, None]]), "light")["data"]
    assert (trace["x"], trace["z"]) == ([0, 50], [[0.1, 0.3], [0.2, None]])
    assert trace["customdata"] == [[10, 10], [11, 11]]


def test_cells_tell_tensor_value_with_unit_and_moment() -> None:
    (trace,) = figures.heatmap(grid("lost_share", [[0.125, None, 0.3]]), "light")["data"]
    assert trace["text"][0][1].split("<br>") == [
        "<b>a.weight</b>",
        "Linear, 64 × 192, float32",
        "lost to underflow (estimate): 30 % of elements",
        "step 49 (attempt 50)",
    ]


def test_a_tensor_whose_description_has_not_arrived_says_so() -> None:
    unnamed = {"id": 10, "name": "tensor 10"} | dict.fromkeys(("module_type", "shape", "dtype"))
    (trace,) = figures.heatmap(grid("norm", [[1.0, 1.0, 1.0]]) | {"tensors": [unnamed]}, "light")["data"]
    assert trace["text"][0][0].split("<br>")[1] == "its description has not arrived"


def test_a_process_that_follows_another_is_drawn_behind_it() -> None:
    data = grid("norm", [[1.0, 1.0, 1.0]])
    data["tensors"][0]["producer"] = "b"
    assert figures.heatmap(data, "light", {"b": 100})["data"][0]["x"] == [100, 125, 150]


def test_norms_and_counts_are_coloured_by_decades() -> None:
    (norm,) = figures.heatmap(grid("norm", [[100.0, 0.0, 0.01]]), "light")["data"]
    (count,) = figures.heatmap(grid("nonfinite", [[0, 9, 99]]), "light")["data"]
    assert (norm["z"], count["z"]) == ([[2.0, None, -2.0]], [[0.0, 1.0, 2.0]])


def test_the_worst_headroom_is_coloured_as_the_worst_share() -> None:
    (share,) = figures.heatmap(grid("lost_share", [[0.0, 0.5, 1.0]]), "light")["data"]
    (headroom,) = figures.heatmap(grid("headroom_log2", [[0.0, 1.0, 4.0]]), "light")["data"]
    assert headroom["colorscale"][0] == [0.0, share["colorscale"][-1][1]]
    assert headroom["zmax"] == 4.0


def test_names_are_text_not_markup() -> None:
    heatmap = grid("norm", [[1.0, 1.0, 1.0]])
    heatmap["tensors"][0]["name"] = '<a href="x">&amp;'
    figure = figures.heatmap(heatmap, "light")
    escaped = '&lt;a href="x"&gt;&amp;amp;'
    assert figure["layout"]["yaxis"]["ticktext"] == [escaped]
    assert figure["data"][0]["text"][0][0].startswith(f"<b>{escaped}</b>")


def test_long_names_keep_both_ends() -> None:
    heatmap = grid("norm", [[1.0, 1.0, 1.0]])
    heatmap["tensors"][0]["name"] = "transformer.encoder.layers.11.attention.qkv.weight"
    (text,) = figures.heatmap(heatmap, "light")["layout"]["yaxis"]["ticktext"]
    assert text == "transformer…1.attention.qkv.weight"


def histograms(hist: list[list[int]]) -> Json:
    attempts = [25 * i for i in range(len(hist))]
    bins = list(range(-48, 16))
    return {
        "tensor": 3,
        "bins_log2": bins,
        "attempt": attempts,
        "step": attempts,
        "scale": [65536.0] * len(hist),
        "hist": hist,
    }


def counts(**by_bin: int) -> list[int]:
    return [by_bin.get(f"b{b}", 0) for b in range(64)]


def test_histogram_shows_the_share_of_each_bin() -> None:
    figure = figures.histogram(histograms([counts(b48=25, b49=75)]), "dark")
    (trace,) = figure["data"]
    assert (trace["y"][48], trace["z"][47:50]) == (0.5, [[None], [math.log10(0.25)], [math.log10(0.75)]])
    assert trace["text"][48][0].split("<br>") == [
        "<b>25 %</b> of non-zero elements (25)",
        "2<sup>0</sup> ≤ |scaled gradient| &lt; 2<sup>1</sup>",
        "scale 2<sup>16</sup> (65,536)",
        "step 0",
    ]
    go.Figure(figure)


def test_histogram_marks_the_limits_of_float16() -> None:
    layout = figures.histogram(histograms([counts(b48=1)]), "light")["layout"]
    assert [line["y0"] for line in layout["shapes"]] == [16, -14, -24]
    assert layout["yaxis"]["range"] == [-26, 18]


@pytest.mark.parametrize("hist", [[], [counts()]])
def test_histogram_of_nothing_is_an_empty_figure(hist: list[list[int]]) -> None:
    figure = figures.histogram(histograms(hist), "light")
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    go.Figure(figure)
