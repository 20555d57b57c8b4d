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

VERSIONS = (1, 2, 3)


def stored(table: dict[str, np.ndarray], version: int = codec.CODEC) -> dict[str, np.ndarray]:
    """A table as it comes back."""
    found = codec.encode(table, version)
    return codec.decode(found.data, None, found.hist)


def roundtrip(column: np.ndarray) -> np.ndarray:
    return stored({"x": column})["x"]


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


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("count", [0, 7, 2**31 - 1, 2**31, 2**62])
def test_histograms_come_back(version: int, count: int) -> None:
    hist = np.zeros((3, 64), np.int64)
    hist[0, 5], hist[1, 40], hist[2, 63] = count, count, 1
    assert stored({"hist": hist}, version)["hist"].tolist() == hist.tolist()
    assert stored({"hist": hist[:0]}, version)["hist"].shape == (0, 64)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rows", [0, 1, 3, 100, 20_000])
def test_columns_of_every_kind_come_back_side_by_side(version: int, rows: int) -> None:
    at = np.arange(rows)
    table = {
        "attempt": at + 10**12,
        "low": -at,
        "flag": (at % 3 == 0).astype("|u1"),
        "single": np.float32(0.1) * at.astype(np.float64),
        "double": 0.1 * at,
        "missing": np.where(at % 2, MISSING, math.nan),
        "zero": np.where(at % 2, 0.0, -0.0),
        "constant": np.full(rows, -7),
        "infinite": np.full(rows, math.inf),
    }
    table["again"] = table["single"]
    found = stored(table, version)
    assert list(found) == list(table) or version == 3
    for name, column in table.items():
        assert (found[name].dtype, found[name].tobytes()) == (column.dtype, column.tobytes()), name


def test_only_the_columns_asked_for_are_decoded() -> None:
    found = codec.encode({"a": np.arange(3), "b": np.arange(3), "hist": np.ones((3, 64), np.int64)})
    assert list(codec.decode(found.data, {"b", "c"}, found.hist)) == ["b"]
    assert sorted(codec.decode(found.data, {"b", "hist"}, found.hist)) == ["b", "hist"]
    assert sorted(codec.names(found.data)) == ["a", "b"]


def test_a_constant_column_costs_next_to_nothing() -> None:
    assert len(codec.encode({"scale": np.full(1024, 65536.0)}).data) < 60
    assert len(codec.encode({"attempt": np.arange(5000, 6024)}).data) < 60


def test_the_first_codec_is_still_read() -> None:
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
