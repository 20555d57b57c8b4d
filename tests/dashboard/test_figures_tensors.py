"""The heatmap and the histogram, with hand-worked values."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from typing import Any

import numpy as np
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


def unpacked(array: Json) -> list[Any]:
    """A typed array as lists, with None for what is left blank."""
    numbers = np.frombuffer(b64decode(array["bdata"]), f"<{array['dtype']}")
    shaped = numbers.reshape([int(n) for n in array["shape"].split(",")]).astype(object)
    return np.where(shaped != shaped, None, shaped).tolist()


STATS = ["lost_share", "subnormal_share", "zero_share", "headroom_log2", "norm", "nonfinite"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("stat", STATS)
def test_heatmap_is_a_figure_that_plotly_accepts_and_json_can_hold(stat: str, theme: figures.Theme) -> None:
    figure = figures.heatmap(grid(stat, [[0.0, "NaN", 0.5], [1.0, None, "Infinity"]]), theme)
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    go.Figure(figure)


def test_columns_without_any_record_are_left_out() -> None:
    figure = figures.heatmap(grid("zero_share", [[0.125, None, 0.5], [0.25, None, None]]), "light")
    trace = figure["data"][0]
    assert (trace["x"], unpacked(trace["z"])) == ([0, 50], [[0.125, 0.5], [0.25, None]])
    assert figure["layout"]["meta"]["tensors"] == [10, 11]


def test_cells_tell_tensor_value_with_unit_and_moment() -> None:
    figure = figures.heatmap(grid("lost_share", [[0.125, None, 0.25]]), "light")
    trace = figure["data"][0]
    assert unpacked(trace["customdata"]) == [[[12.5, 0, 0], [25, 49, 50]]]
    assert figure["layout"]["yaxis2"]["ticktext"] == ["<b>a.weight</b><br>Linear, 64 × 192, float32"]
    assert trace["hovertemplate"].split("<br>") == [
        "%{y}",
        "lost to underflow (estimate): %{customdata[0]:.3~g} % of elements",
        "step %{customdata[1]:,d} (attempt %{customdata[2]:,d})<extra></extra>",
    ]


@pytest.mark.parametrize("steps", [[0, 25, 50], [-1, None, 50]])
def test_where_attempts_are_steps_they_are_told_once(steps: list[int | None]) -> None:
    trace = figures.heatmap(grid("norm", [[2.0, 2.0, 2.0]]) | {"step": steps}, "light")["data"][0]
    assert trace["hovertemplate"].endswith("<br>step %{customdata[1]:,d}<extra></extra>")
    assert unpacked(trace["customdata"]) == [[[2, 0, 0], [2, 25, 25], [2, 50, 50]]]


def test_a_heatmap_of_forty_tensors_takes_a_third_of_a_megabyte() -> None:
    columns = [1000 * c for c in range(200)]
    tensors = [tensor(i, f"transformer.h.{i}.attn.c_attn.weight") for i in range(40)]
    values = [[c / 200_000 for c in columns] for _ in tensors]
    data = {"stat": "norm", "tensors": tensors, "attempt": columns, "step": columns, "values": values}
    assert len(json.dumps(figures.heatmap(data, "light"))) < 333_000


def test_a_tensor_whose_description_has_not_arrived_says_so() -> None:
    unnamed = {"id": 10, "name": "tensor 10"} | dict.fromkeys(("module_type", "shape", "dtype"))
    figure = figures.heatmap(grid("norm", [[1.0, 1.0, 1.0]]) | {"tensors": [unnamed]}, "light")
    assert figure["layout"]["yaxis2"]["ticktext"] == ["<b>tensor 10</b><br>its description has not arrived"]


def test_a_process_that_follows_another_is_drawn_behind_it() -> None:
    data = grid("norm", [[1.0, 1.0, 1.0]])
    data["tensors"][0]["producer"] = "b"
    assert figures.heatmap(data, "light", {"b": 100})["data"][0]["x"] == [100, 125, 150]


def test_norms_and_counts_are_coloured_by_decades() -> None:
    norm = figures.heatmap(grid("norm", [[100.0, 0.0, 0.01]]), "light")["data"][0]
    count = figures.heatmap(grid("nonfinite", [[0, 9, 99]]), "light")["data"][0]
    assert unpacked(norm["z"]) == [[2.0, None, -2.0]]
    assert unpacked(count["z"]) == [[0.0, 1.0, 2.0]]
    assert unpacked(norm["customdata"])[0][2][0] == 0.01


def test_the_worst_headroom_is_coloured_as_the_worst_share() -> None:
    share = figures.heatmap(grid("lost_share", [[0.0, 0.5, 1.0]]), "light")["data"][0]
    headroom = figures.heatmap(grid("headroom_log2", [[0.0, 1.0, 4.0]]), "light")["data"][0]
    assert unpacked(headroom["customdata"])[0][2][0] == 16
    assert headroom["colorscale"][0] == [0.0, share["colorscale"][-1][1]]
    assert headroom["zmax"] == 4.0


def test_names_are_text_not_markup() -> None:
    heatmap = grid("norm", [[1.0, 1.0, 1.0]])
    heatmap["tensors"][0]["name"] = '<a href="x">&amp;'
    figure = figures.heatmap(heatmap, "light")
    escaped = '&lt;a href="x"&gt;&amp;amp;'
    assert figure["layout"]["yaxis"]["ticktext"] == [escaped]
    assert figure["layout"]["yaxis2"]["ticktext"][0].startswith(f"<b>{escaped}</b>")


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
