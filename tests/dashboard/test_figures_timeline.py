"""The timeline: what is drawn from which JSON, with hand-worked values."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
import pytest

from ampwatch_dashboard import figures

Json = dict[str, Any]


def column(
    values: list[Any], low: list[Any] | None = None, high: list[Any] | None = None, **more: Any
) -> Json:
    zeros = [0] * len(values)
    return {
        "min": low or values,
        "max": high or values,
        "mean": values,
        "count": zeros,
        "nan": zeros,
        "inf": zeros,
    } | more


def stream(stride: int = 1, attempts: tuple[int, ...] = (0, 1, 2), **columns: Json) -> Json:
    scale = column([65536.0, 65536.0, 32768.0])
    return {
        "rank": 0,
        "producer": "a" * 32,
        "stream": 0,
        "stride": stride,
        "attempt": list(attempts),
        "step": [0, 0, 1],
        "time": [1.0, 2.0, 3.0],
        "series": {"scale": scale} | columns,
    }


def series(*streams: Json) -> Json:
    return {"run": "r", "names": ["scale", "loss", "norm"], "streams": list(streams)}


def event(kind: str, attempt: int, **data: Any) -> Json:
    return {"type": kind, "attempt": attempt, "step": attempt, "stream": 0, "repeat": 1, "data": data}


def finding(severity: str, first: int, last: int, kind: str = "underflow") -> Json:
    key = f"{kind}-{first}"
    return {"kind": kind, "severity": severity, "key": key, "first_attempt": first, "last_attempt": last}


def traces(figure: Json, name: str) -> list[Json]:
    return [trace for trace in figure["data"] if trace["name"] == name]


SKIP = event("skip", 1, scale=65536.0, scale_after=32768.0, loss="NaN", n_inf=0, n_nan=7, count=2)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_is_a_figure_that_plotly_accepts_and_json_can_hold(theme: figures.Theme) -> None:
    loss = column([2.0, None, 1.0], nan=[0, 1, 0])
    figure = figures.timeline(series(stream(loss=loss)), [SKIP], [finding("fatal", 1, 2)], theme)
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure
    go.Figure(figure)


def test_scale_is_drawn_as_its_base_two_logarithm() -> None:
    figure = figures.timeline(series(stream()), [], [], "light")
    (scale,) = traces(figure, "loss scale")
    assert (scale["x"], scale["y"], scale["line"]["shape"]) == ([0, 1, 2], [16.0, 16.0, 15.0], "hv")
    assert scale["text"][2] == "<b>loss scale</b> 2<sup>15</sup> (32,768)<br>step 1 (attempt 2)"


def test_ticks_of_the_scale_are_powers_of_two() -> None:
    layout = figures.timeline(series(stream()), [], [], "light")["layout"]
    assert layout["yaxis"]["tickvals"] == [14, 15, 16, 17]
    assert layout["yaxis"]["ticktext"][1] == "2<sup>15</sup>"


def test_scale_that_fell_to_the_floor_of_float32_keeps_few_ticks() -> None:
    fell = stream() | {"series": {"scale": column([2.0**16, 1.0, 2.0**-149])}}
    layout = figures.timeline(series(fell), [], [], "light")["layout"]
    assert layout["yaxis"]["tickvals"] == [-128, -64, 0]
    assert layout["yaxis"]["ticktext"][0] == "2<sup>−128</sup>"


def test_a_scale_of_zero_stands_below_all_others() -> None:
    fell = stream() | {"series": {"scale": column([2.0**16, 2.0**-149, 0.0])}}
    zero = event("skip", 2, scale=0.0, scale_after=0.0)
    figure = figures.timeline(series(fell), [zero], [], "light")
    assert figure["data"][0]["y"] == [16.0, -149.0, -150.0]
    assert traces(figure, "skipped step")[0]["y"] == [-150.0]
    assert figure["layout"]["yaxis"]["tickvals"] == [-150, -64, 0]
    assert figure["layout"]["yaxis"]["ticktext"][0] == "0"


def test_events_stand_where_they_happened_each_kind_with_its_own_mark() -> None:
    changes = [
        SKIP,
        event("backoff", 1, scale=65536.0, scale_after=32768.0),
        event("growth", 2, scale=2.0**15, scale_after=2.0**16),
    ]
    figure = figures.timeline(series(stream()), changes, [], "light")
    marks = [traces(figure, name)[0] for name in ("skipped step", "backoff", "growth")]
    assert [(m["x"], m["y"]) for m in marks] == [([1], [16.0]), ([1], [15.0]), ([2], [16.0])]
    assert len({m["marker"]["symbol"] for m in marks}) == len({m["marker"]["color"] for m in marks}) == 3


def test_a_skip_tells_its_step_scales_loss_and_elements() -> None:
    figure = figures.timeline(series(stream()), [SKIP | {"step": 0, "repeat": 3}], [], "light")
    assert traces(figure, "skipped step")[0]["text"][0].split("<br>") == [
        "<b>skipped step</b>, step 0 (attempt 1)",
        "scale 2<sup>16</sup> (65,536) → 2<sup>15</sup> (32,768)",
        "loss NaN",
        "0 inf, 7 NaN elements in 2 tensors",
        "the same 3 times in a row",
    ]


def test_a_mark_for_several_events_says_how_many() -> None:
    group = SKIP | {"count": 1200, "last_attempt": 1500}
    (trace,) = traces(
        figures.timeline(series(stream()), [group], [], "light"), "skipped step (1,200, close ones together)"
    )
    assert trace["text"][0].split("<br>")[1] == "the first of 1,200 up to attempt 1,500; zoom in to see each"


def test_events_that_are_no_change_of_scale_are_not_drawn() -> None:
    figure = figures.timeline(series(stream()), [event("heartbeat", -1)], [], "light")
    assert [trace["name"] for trace in figure["data"]] == ["loss scale"]


def test_losses_that_are_no_number_are_marks_at_the_top_not_gaps() -> None:
    loss = column([2.0, None, None], nan=[0, 1, 0], inf=[0, 0, 1])
    figure = figures.timeline(series(stream(loss=loss)), [], [], "light")
    (nan,), (inf,) = traces(figure, "loss is NaN"), traces(figure, "loss is infinite")
    assert (nan["x"], inf["x"], nan["yaxis"]) == ([1], [2], "y4")
    assert nan["marker"]["symbol"] != inf["marker"]["symbol"]
    assert nan["text"] == ["<b>loss is NaN</b> at 1 of 1 attempts<br>step 0 (attempt 1)"]
    assert figure["layout"]["yaxis4"]["overlaying"] == "y2"


def test_a_point_over_many_attempts_spans_from_its_smallest_to_its_largest_value() -> None:
    loss = column([2.0, None, 1.0], low=[1.0, None, 0.5], high=[9.0, None, 1.5])
    coarse = stream(stride=10, attempts=(0, 10, 20), loss=loss)
    figure = figures.timeline(series(coarse), [], [], "light")
    envelope, line = traces(figure, "loss")
    assert envelope["x"] == [0, 10, 10, 0, 0, None, 20, 30, 30, 20, 20, None]
    assert envelope["y"] == [9.0, 9.0, 1.0, 1.0, 9.0, None, 1.5, 1.5, 0.5, 0.5, 1.5, None]
    assert line["text"][0] == "<b>loss</b> mean 2<br>1 … 9 over 10 attempts<br>step 0"


def test_wide_ranging_losses_get_a_logarithmic_axis() -> None:
    narrow = figures.timeline(series(stream(loss=column([2.0, 3.0, 1.0]))), [], [], "light")
    wide = figures.timeline(series(stream(loss=column([200.0, 3.0, 1.0]))), [], [], "light")
    assert [f["layout"]["yaxis2"]["type"] for f in (narrow, wide)] == ["linear", "log"]
    assert wide["layout"]["yaxis2"]["dtick"] == 1  # powers of ten


def test_streams_are_told_apart_by_what_differs() -> None:
    other = stream() | {"rank": 1}
    figure = figures.timeline(series(stream(), other), [], [], "light")
    assert [trace["name"] for trace in figure["data"]] == ["rank 0", "rank 1"]


def test_a_resumed_job_is_one_line_with_a_seam() -> None:
    again = stream() | {"producer": "b" * 32}
    found = finding("fatal", 1, 2) | {"producer": "b" * 32}
    skips = [SKIP | {"producer": "a" * 32}, SKIP | {"producer": "b" * 32}]
    figure = figures.timeline(series(stream(), again), skips, [found], "light", {"a" * 32: 0, "b" * 32: 3})
    first, second = (trace for trace in figure["data"] if trace["yaxis"] == "y" and "line" in trace)
    assert (first["x"], second["x"]) == ([0, 1, 2], [3, 4, 5])
    assert first["line"]["color"] == second["line"]["color"]
    assert second["text"][0].split("<br>")[1] == "process bbbbbb"
    assert traces(figure, "skipped step")[0]["x"] == [1, 4]
    band, seam = figure["layout"]["shapes"]
    assert ((band["x0"], band["x1"]), (seam["x0"], seam["x1"])) == ((3.5, 5.5), (2.5, 2.5))
    assert "resumed, process bbbbbb" in [note["text"] for note in figure["layout"]["annotations"]]


def test_findings_are_bands_named_by_their_keys_the_worst_labelled() -> None:
    found = [finding("info", 0, 0, "calibration"), finding("fatal", 1, 2, "forward_overflow")]
    layout = figures.timeline(series(stream()), [], found, "light")["layout"]
    bands = [(shape["name"], shape["x0"], shape["x1"]) for shape in layout["shapes"]]
    assert bands == [("calibration-0", -0.5, 0.5), ("forward_overflow-1", 0.5, 2.5)]
    assert layout["annotations"][0]["text"] == "forward overflow"


def test_a_run_without_records_is_an_empty_figure() -> None:
    figure = figures.timeline(series(), [], [], "dark")
    assert figure["data"] == []
    go.Figure(figure)
