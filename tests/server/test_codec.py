from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ampwatch.records import MISSING, is_missing, missing
from ampwatch_server.store import codec


def roundtrip(column: np.ndarray) -> np.ndarray:
    return codec.decode(codec.encode({"x": column}))["x"]


@given(hnp.arrays("<i8", st.integers(0, 50), elements=st.integers(-(2**63), 2**63 - 1)))
def test_integers_come_back(column: np.ndarray) -> None:
    assert roundtrip(column).tolist() == column.tolist()


@given(st.lists(st.floats(width=64) | st.just(MISSING)))
def test_reals_come_back(values: list[float]) -> None:
    column = np.array(values)
    found = roundtrip(column)
    np.testing.assert_array_equal(found, column)
    assert is_missing(found).tolist() == is_missing(column).tolist()


@pytest.mark.parametrize("values", [[1.5, math.nan, math.inf, -math.inf, -0.0], [0.1, 1e300, 5e-324]])
def test_missing_is_not_a_measured_nan(values: list[float]) -> None:
    found = roundtrip(np.concatenate([missing(2), values, [math.nan]]))
    assert is_missing(found).tolist() == [True, True, *[False] * (len(values) + 1)]


@given(hnp.arrays("|u1", st.integers(0, 20)))
def test_flags_keep_their_type(column: np.ndarray) -> None:
    assert roundtrip(column).dtype == np.uint8
    assert roundtrip(column).tolist() == column.tolist()


def test_histograms_keep_their_shape() -> None:
    column = np.arange(128).reshape(2, 64)
    assert roundtrip(column).tolist() == column.tolist()


def test_only_the_columns_asked_for_are_decoded() -> None:
    data = codec.encode({"a": np.arange(3), "b": np.arange(3)})
    assert list(codec.decode(data, {"b", "c"})) == ["b"]


def test_a_constant_column_costs_next_to_nothing() -> None:
    assert len(codec.encode({"scale": np.full(1024, 65536.0)})) < 60
    assert len(codec.encode({"attempt": np.arange(5000, 6024)})) < 60


def test_the_codec_before_is_still_read() -> None:
    """It had signed differences, and histograms row by row."""
    pack = zstandard.ZstdCompressor().compress
    steps = np.array([7, -2], "<i1").tobytes()
    hist = np.arange(4, dtype="<i1").tobytes()
    columns = {"n": ("<i8", "<i1", 1, True, 2, pack(steps)), "hist": ("<i8", "<i1", 2, False, 2, pack(hist))}
    found = codec.decode(msgspec.msgpack.encode(columns))
    assert {name: column.tolist() for name, column in found.items()} == {
        "n": [7, 5],
        "hist": [[0, 1], [2, 3]],
    }
