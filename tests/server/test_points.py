from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwatch.records import MISSING, to_json_list
from ampwatch_server.store import points, windows
from ampwatch_server.store.rows import unique


def shown(table: points.Table) -> dict[str, list[object]]:
    return {name: to_json_list(column) for name, column in table.items()}


def test_a_point_by_hand() -> None:
    rows = {
        "attempt": np.arange(6),
        "step": np.arange(6) + 10,
        "x": np.array([3.0, math.nan, MISSING, math.inf, -math.inf, 1.0]),
    }
    assert shown(points.merge(points.from_rows(rows, ["x"]), 4)) == {
        "attempt": [0, 4],
        "rows": [4, 2],
        "step": [10.0, 14.0],
        "time": [None, None],
        "x:min": [3.0, 1.0],
        "x:max": [3.0, 1.0],
        "x:sum": [3.0, 1.0],
        "x:count": [1, 1],
        "x:nan": [1, 0],
        "x:pinf": [1, 0],
        "x:ninf": [0, 1],
    }


def test_a_point_with_nothing_finite_has_no_extremes() -> None:
    rows = {"attempt": np.arange(2), "x": np.array([math.nan, MISSING])}
    merged = shown(points.merge(points.from_rows(rows, ["x"]), 2))
    assert (merged["x:min"], merged["x:max"], merged["x:nan"]) == ([None], [None], [1])


values = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf, MISSING])


@given(st.lists(values, min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 5))
def test_points_of_points_are_the_points_of_the_rows(data: list[float], a: int, b: int) -> None:
    rows = {"attempt": np.arange(len(data)), "x": np.array(data)}
    single = points.from_rows(rows, ["x"])
    direct, twice = points.merge(single, a * b), points.merge(points.merge(single, a), a * b)
    assert direct.keys() == twice.keys()
    for name in direct:
        np.testing.assert_allclose(twice[name], direct[name], rtol=1e-9, atol=1e-6)


@given(st.lists(values, min_size=1, max_size=80), st.integers(1, 5), st.booleans())
def test_rows_are_summarised_as_their_points_are(data: list[float], stride: int, of_tensors: bool) -> None:
    at = np.arange(len(data))
    rows = {"attempt": at[::-1] // 2 if of_tensors else at, "x": np.array(data), "y": at * 1.0}
    rows |= {"tensor": at % 2, "hist": np.ones((len(data), 64), np.int64)} if of_tensors else {}
    names = ["x", "y", "absent"]
    direct, expected = (
        points.summarise(rows, names, stride),
        points.merge(points.from_rows(rows, names), stride),
    )
    assert shown(direct) == shown(expected)


def test_histograms_are_summed_for_each_tensor() -> None:
    rows = {"attempt": np.array([0, 0, 1]), "tensor": np.array([1, 0, 1]), "hist": np.ones((3, 64), np.int64)}
    merged = points.merge(points.from_rows(rows, []), 16)
    assert merged["tensor"].tolist() == [0, 1]
    assert merged["hist"][:, 0].tolist() == [1, 2]


def test_of_rows_that_disagree_the_latest_batch_wins() -> None:
    table = {"attempt": np.array([1, 0, 1]), "seq": np.array([5, 4, 3]), "x": np.array([1.0, 2.0, 3.0])}
    assert unique(table)["x"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "attempts", "wanted", "expected"),
    [
        ("attempts", 600, 600, (0, 1)),
        ("attempts", 5000, 600, (0, 8)),
        ("attempts", 12_000, 600, (1, 16)),
        ("attempts", 2_000_000, 600, (2, 3328)),
        ("tensors", 20_000, 200, (0, 100)),
        ("tensors", 2_000_000, 200, (2, 8192)),
        ("attempts", 0, 600, (0, 1)),
    ],
)
def test_the_level_is_chosen_by_the_points_wanted(
    kind: str, attempts: int, wanted: int, expected: tuple[int, int]
) -> None:
    assert windows.stride_for(kind, attempts, wanted) == expected
