"""The statistics pass against an independent count, element by element in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ampwatch.stats.layout import HIST_BINS, SCALARS, WIDTH
from ampwatch.stats.reference import BLOCK, GATHERED, statistics, statistics_of

torch.set_num_threads(1)

BITS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}
SUM_SQ = SCALARS.index("sum_sq")
inf, nan = math.inf, math.nan


def on_bfloat16_grid(x: float) -> bool:
    """Eight significant bits, none below 2^-133, at most (2 - 2^-7) 2^127."""
    mantissa, _ = math.frexp(x)
    return (mantissa * 2**8).is_integer() and (x * 2.0**133).is_integer() and abs(x) <= (2 - 2**-7) * 2.0**127


def on_float16_grid(x: float) -> bool:
    """Eleven significant bits, none below 2^-24, at most 65504."""
    mantissa, _ = math.frexp(x)
    return (mantissa * 2**11).is_integer() and (x * 2.0**24).is_integer() and abs(x) <= 65504


def count(elements: list[float]) -> dict[str, object]:
    """The definition of docs/numerics.md, section 3, one element after another."""
    finite = [abs(x) for x in elements if math.isfinite(x)]
    some = [x for x in finite if x > 0]
    bins = [min(max(math.frexp(x)[1] - 1 + 48, 0), HIST_BINS - 1) for x in some]
    return {
        "numel": len(elements),
        "n_inf": sum(map(math.isinf, elements)),
        "n_nan": sum(map(math.isnan, elements)),
        "n_zero": len(finite) - len(some),
        "n_subnormal": sum(x < 2**-14 for x in some),
        "n_below": sum(x < 2**-24 for x in some),
        "n_offgrid": sum(not on_float16_grid(x) for x in some),
        "n_offgrid_bf16": sum(not on_bfloat16_grid(x) for x in some),
        "max_abs": max(finite, default=0.0),
        "hist": [bins.count(b) for b in range(HIST_BINS)],
    }


def named(row: torch.Tensor) -> dict[str, object]:
    """A row of statistics by name, without sum_sq."""
    assert row.shape == (WIDTH,)
    assert row.dtype == torch.float64
    values = row.tolist()
    return {n: v for n, v in zip(SCALARS, values, strict=False) if n != "sum_sq"} | {
        "hist": values[len(SCALARS) :]
    }


def check(row: torch.Tensor, tensor: torch.Tensor) -> None:
    elements = tensor.double().flatten().tolist()
    assert named(row) == count(elements)
    with np.errstate(over="ignore"):
        squares = np.array([x for x in elements if math.isfinite(x)], dtype=np.float64) ** 2
    assert row[SUM_SQ].item() == pytest.approx(float(squares.sum()), rel=1e-9)


def from_bits(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    unsigned = np.array(patterns, dtype=f"u{BITS[dtype] // 8}")
    return torch.from_numpy(unsigned.view(f"i{BITS[dtype] // 8}")).view(dtype)


@st.composite
def gradients(draw):
    """Any bits at all, with the edges of the formats more often than chance has them."""
    dtype = draw(st.sampled_from(list(BITS)))
    edges = [0.0, -0.0, inf, -inf, nan, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-48, 2.0**15, 2.0**16, 65504.0]
    special = torch.tensor(edges, dtype=dtype)
    near = special.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[BITS[dtype]])
    patterns = st.integers(0, 2 ** BITS[dtype] - 1)
    wild = from_bits(draw(st.lists(patterns, max_size=40)), dtype)
    picked = draw(st.lists(st.sampled_from(torch.cat([near, near - 1, near + 1]).tolist()), max_size=40))
    return torch.cat([wild, torch.tensor(picked, dtype=near.dtype).view(dtype)])


@given(gradients())
def test_any_bits_of_any_dtype(grad):
    check(statistics(grad), grad)


@given(st.lists(gradients(), max_size=6))
def test_any_tensors_together(grads):
    rows = statistics_of(grads)
    assert rows.shape == (len(grads), WIDTH)
    for row, grad in zip(rows, grads, strict=True):
        check(row, grad)


def test_by_hand():
    # 3 = 1.5 * 2^1 stands in bin 49; 2^-15 is subnormal in float16; 2^-26 + 2^-40 is on neither grid.
    grad = torch.tensor([3.0, -(2.0**-15), 2.0**-26 + 2.0**-40, 0.0, -0.0, inf, -inf, nan])
    row = named(statistics(grad))
    hist = row.pop("hist")
    assert list(row.values()) == [8, 2, 1, 2, 2, 1, 1, 1, 3.0]
    assert {b: n for b, n in enumerate(hist) if n} == {49: 1, 33: 1, 22: 1}
    assert statistics(grad)[SUM_SQ].item() == pytest.approx(9 + 2.0**-30 + 2.0**-52)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_a_16_bit_format(dtype):
    grad = from_bits(list(range(2**16)), dtype)
    check(statistics(grad), grad)


@pytest.mark.parametrize("dtype", list(BITS))
def test_just_below_a_power_of_two_stands_in_the_lower_bin(dtype):
    powers = torch.tensor([2.0**k for k in range(-13, 15)], dtype=dtype)
    below = torch.nextafter(powers, torch.zeros_like(powers)) if BITS[dtype] > 16 else powers * (1 - 2**-8)
    expected = [0] * 34 + [1] * 28 + [0] * 2  # 2^-14 is bin 34
    assert named(statistics(below))["hist"] == expected
    assert named(statistics(powers))["hist"] == [0, *expected[:-1]]


@pytest.mark.parametrize(
    ("bits", "dtype"), [(1, torch.float32), (2**23 - 1, torch.float32), (1, torch.float64)]
)
def test_the_formats_own_subnormals_are_clamped_into_the_first_bin(bits, dtype):
    grad = from_bits([bits, bits | 1 << (BITS[dtype] - 1)], dtype)
    row = named(statistics(grad))
    assert (row["n_zero"], row["n_below"], row["hist"][0], row["max_abs"]) == (
        0,
        2,
        2,
        grad[0].double().item(),
    )


@pytest.mark.parametrize("size", [1e20, 1e-25, 3e38, 1e-38])
def test_squares_beyond_float32(size):
    grad = torch.full((1001,), size)
    exact = 1001 * grad[0].double().item() ** 2
    assert statistics(grad)[SUM_SQ].item() == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    "size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, GATHERED - 1, GATHERED, GATHERED + 1, 3 * GATHERED + 7]
)
def test_sizes(size):
    grad = torch.linspace(-1e-6, 7e4, size)
    check(statistics(grad), grad)


def test_tensors_gathered_and_cut_keep_their_order():
    sizes = [5, GATHERED + 3, 0, 64, GATHERED - 2, 1, 40_000, 40_000, 2 * GATHERED]
    grads = [torch.full((n,), float(i + 1)) for i, n in enumerate(sizes)]
    rows = statistics_of(grads)
    assert rows[:, 0].tolist() == sizes
    assert rows[:, SUM_SQ].tolist() == pytest.approx([n * (i + 1) ** 2 for i, n in enumerate(sizes)])


def test_more_tensors_than_there_are_counters_for_at_once():
    rows = statistics_of([torch.full((2,), float(i)) for i in range(5000)])
    assert rows[:, SCALARS.index("max_abs")].tolist() == list(range(5000))


def test_the_same_shapes_again_are_counted_afresh():
    first, second = torch.full((70,), 2.0), torch.zeros(70)
    statistics(first)
    check(statistics(second), second)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1::3],
        lambda x: x[:, :1].expand(-1, 7),
        lambda x: x.flatten()[1:],
        lambda x: x.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda x: x[0, 0],
    ],
    ids=["transposed", "strided", "expanded", "misaligned", "channels_last", "scalar"],
)
def test_views(view):
    grad = view(torch.linspace(-3, 1e5, 120).view(12, 10))
    check(statistics(grad), grad)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_is_taken_as_its_real_view(dtype):
    grad = torch.tensor([3 + 4j, complex(inf, 0)], dtype=dtype)
    assert torch.equal(statistics(grad), statistics(torch.view_as_real(grad)))
    assert torch.equal(statistics(grad.conj()), statistics(grad))


def test_sparse_values_stand_as_they_are():
    grad = torch.sparse_coo_tensor([[1, 1]], [4.0, -4.0], (5,), check_invariants=True)
    check(statistics(grad), torch.tensor([4.0, -4.0]))


def test_the_gradient_is_left_alone():
    grad = torch.tensor([-1.0, nan, -inf, 1e-45])
    before = grad.view(torch.int32).clone()
    statistics(grad)
    assert torch.equal(grad.view(torch.int32), before)


@pytest.mark.parametrize("dtype", list(BITS))
def test_autocast_changes_nothing(dtype):
    grad = torch.linspace(-6e4, 6e4, 1001).to(dtype)
    with torch.autocast("cpu", dtype=torch.float16):
        inside = statistics(grad)
    assert torch.equal(inside, statistics(grad))


def test_nothing_is_read_on_the_host():
    with FakeTensorMode():
        grads = [torch.empty(300, 300, device="cuda"), torch.empty(7, device="cuda", dtype=torch.float64)]
        rows = statistics_of(grads)
    assert (rows.shape, rows.device.type) == ((2, WIDTH), "cuda")
