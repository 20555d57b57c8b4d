"""The Triton kernel: interpreted against the reference and torch's op, and compiled for GPUs that are not here."""

from __future__ import annotations

import math
import re
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

from ampwatch.stats import fused, reference
from ampwatch.stats.layout import SCALARS

triton = pytest.importorskip("triton")

from .interpreted import Interpreter  # noqa: E402 - it needs Triton

torch.set_num_threads(1)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TILE = 4096  # elements, of float32 and narrower
SUM_SQ = SCALARS.index("sum_sq")
inf, nan = math.inf, math.nan


@pytest.fixture(scope="module")
def interpreted():
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


def wild(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every magnitude of the dtype, with zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    grad = torch.randint(
        torch.iinfo(bits).min, torch.iinfo(bits).max, (size,), dtype=bits, generator=generator
    )
    grad = grad.view(dtype)
    grad[::5] = torch.randn(len(grad[::5]), generator=generator).half().to(dtype)  # some on the grids
    specials = [0.0, -0.0, inf, -inf, nan, 2.0**-14, 2.0**-24, 2.0**-48, 65504.0, 65520.0]
    grad[: len(specials)] = torch.tensor(specials[:size], dtype=dtype)
    return grad


def check(rows: Tensor, grads: list[Tensor]) -> None:
    """The contract of another implementation (ampwatch/stats/README.md)."""
    expected = reference.statistics_of(grads)
    others = [i for i in range(rows.shape[1]) if i != SUM_SQ]
    assert rows[:, others].tolist() == expected[:, others].tolist()
    assert rows[:, SUM_SQ].tolist() == pytest.approx(expected[:, SUM_SQ].tolist(), rel=1e-5)


def by_torch(grads: list[Tensor], inverse: float) -> tuple[list[Tensor], float]:
    copies, found_inf = [grad.clone() for grad in grads], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(copies, found_inf, torch.tensor([inverse]))
    return copies, found_inf.item()


def around(grad: Tensor) -> Tensor:
    """All of the memory that a view is part of."""
    return torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())


def bits(grad: Tensor) -> list[int]:
    """As integers, all NaN alike: numpy and torch's vectorised code hand on different ones."""
    grad = torch.where(grad.isnan(), torch.full_like(grad, nan), grad)
    return grad.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.itemsize]).flatten().tolist()


# ---------------------------------------------------------------------------------------------------- interpreted


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_equal_the_reference(interpreted, dtype):
    grads = [wild(TILE + 77, dtype), torch.zeros(3, dtype=dtype)]
    rows, taken = interpreted("statistics", grads)
    assert taken == [True, True]
    check(rows, grads)


# The interpreter cuts bfloat16 off instead of rounding it, so there only a power of two can be tried.
@pytest.mark.parametrize(
    ("dtype", "inverse"),
    [
        (torch.float16, 0.3),
        (torch.bfloat16, 2.0**-3),
        (torch.float32, 0.3),
        (torch.float32, 2.0**-126),  # subnormal results
        (torch.float32, inf),  # 1/S below 2^-128: 0 becomes NaN, and what is finite infinite
        (torch.float32, 1.0),
        (torch.float64, 0.3),
    ],
)
def test_unscaling_equals_torch(interpreted, dtype, inverse):
    grads = [wild(300, dtype), torch.arange(-9.0, 9.0).to(dtype)]
    if dtype is torch.bfloat16:  # nor are its subnormal results rounded
        grads[0] = torch.where(grads[0].abs() < 2.0**-120, 0.0, grads[0])
    expected, found_inf = by_torch(grads, inverse)
    rows, unscaled, found = interpreted("unscale", grads, inverse)
    assert [bits(grad) for grad in unscaled] == [bits(grad) for grad in expected]
    assert found == found_inf == 1.0
    check(rows, grads)


def test_found_inf_is_left_alone_by_finite_gradients(interpreted):
    _, (unscaled,), found = interpreted("unscale", [torch.tensor([2.0, 65504.0, -3e38])], 0.5)
    assert (unscaled.tolist(), found) == (torch.tensor([1.0, 32752.0, -1.5e38]).tolist(), 0.0)


def test_sizes_and_alignments(interpreted):
    sizes = [0, 1, 2, 7, TILE - 1, TILE, TILE + 1, 2 * TILE + 3]
    grads = [torch.full((n + 3,), 1.0 + n)[skip:][:n] for n in sizes for skip in (0, 1, 3)]
    rows, unscaled, _ = interpreted("unscale", grads, 0.3)
    assert [grad.data_ptr() % 16 for grad in unscaled[-3:]] == [0, 4, 12]
    check(rows, grads)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor([0.3]))
    assert all(torch.equal(around(one), around(other)) for one, other in zip(unscaled, grads, strict=True))


def test_what_is_dense_is_taken_in_any_order_and_the_rest_left_to_torch(interpreted):
    base = torch.linspace(-3, 1e5, 120)
    dense = [base.view(12, 10).t(), base.view(2, 3, 4, 5).to(memory_format=torch.channels_last), base[7]]
    strided = [base[::2], base[:1].expand(5), base.cfloat(), base.view(12, 10)[:, :5]]
    sparse = torch.sparse_coo_tensor([[1, 1]], [4.0, -4.0], (5,), check_invariants=True)
    grads = [strided[0], dense[0], sparse, strided[1], dense[1], dense[2], strided[2], strided[3]]
    rows, taken = interpreted("statistics", grads)
    assert taken == [False, True, False, False, True, True, False, False]
    check(rows, grads)


def test_hundreds_of_tensors(interpreted):
    grads = [torch.full((1 + i % 7,), float(i)) for i in range(200)]
    rows, unscaled, _ = interpreted("unscale", grads, 0.5)
    check(rows, grads)
    assert [grad[-1].item() for grad in unscaled] == [i / 2 for i in range(200)]


def test_a_launch_that_fails_after_others_says_that_gradients_are_written(interpreted):
    grads = [torch.full((3,), 8.0), torch.full((6,), 8.0)[::2], torch.full((3,), 8.0, dtype=torch.float64)]
    error, grads = interpreted("fail_late", grads, 0.5)
    assert (error, [grad[0].item() for grad in grads]) == ("Touched(ZeroDivisionError('late'))", [4, 4, 8])


def test_several_dtypes_keep_their_places(interpreted):
    grads = [torch.full((i + 1,), 2.0**i, dtype=DTYPES[i % 4]) for i in range(9)]
    check(interpreted("statistics", grads)[0], grads)


def test_just_below_a_power_of_two_stands_in_the_lower_bin(interpreted):
    powers = torch.tensor([2.0**k for k in range(-50, 20)])
    grads = [powers, torch.nextafter(powers, torch.zeros(())), torch.nextafter(powers, torch.ones(()) * inf)]
    check(interpreted("statistics", grads)[0], grads)


def test_squares_beyond_float32(interpreted):
    sizes = [1e20, 1e-25, 3e38, 1e-38, 1e-44]
    grads = [torch.full((1001,), size) for size in sizes]
    check(interpreted("statistics", grads)[0], grads)


def test_beyond_2_31_elements(interpreted):
    row = interpreted("far_end", [1.0, 2.0, inf, 0.0, -4.0])
    seen = torch.tensor([1.0, 2.0, inf, 0.0, -4.0])
    expected = reference.statistics(seen)
    expected[SCALARS.index("numel")] = 2**31 + 5
    expected[SCALARS.index("n_zero")] = 2**31 + 1  # what was not looked at leaves nothing in the histogram
    assert row.tolist() == expected.tolist()


def test_counts_of_the_longest_item_do_not_meet(interpreted):
    size = 120 * TILE
    row = interpreted("one_item", torch.full((size + 1,), 1.1)[1:])
    counts = dict(zip(SCALARS, row.tolist(), strict=False))
    assert [counts[n] for n in ("numel", "n_zero", "n_offgrid", "n_offgrid_bf16")] == [size, 0, size, size]
    assert (row[len(SCALARS) + 48].item(), row[SUM_SQ].item()) == (size, pytest.approx(size * 1.21, rel=1e-5))


@pytest.mark.parametrize("sizes", [(1e-44, 1e-30, 1e-3, 1e20, 3e38), (3e38, 1e-3, 1e-44), (0.0, 1e-25)])
def test_squares_that_rise_and_fall_within_an_item(interpreted, sizes):
    grad = torch.cat([torch.full((TILE,), size) for size in sizes])
    check(interpreted("one_item", grad).unsqueeze(0), [grad])


def test_the_trial_of_the_doctor_is_passed(interpreted):
    assert interpreted("tried", torch.float32) == (
        True,
        "equal to its definition in 6 lists of gradients; 28 M elements take 130 us, torch's own pass 100 us, "
        "and the reference 900 us more",
    )


def test_the_trial_finds_what_the_interpreter_does_wrong(interpreted):
    """It cuts bfloat16 off instead of rounding it."""
    holds, says = interpreted("tried", torch.bfloat16)
    assert (holds, says.startswith("any bits of bfloat16")) == (False, True)


# ------------------------------------------------------------------------------------------- compiled, and not run


def compiled(target: Any, dtype: str, unscaling: bool = True) -> Any:
    import triton.language as tl

    from ampwatch.stats import triton_kernel as kernel

    rows, columns = kernel.tile_shape(getattr(tl, dtype).primitive_bitwidth // 8)
    signature = dict.fromkeys(("addresses", "sizes", "items"), "*i64") | {"counts": "*i32", "reals": "*fp64"}
    signature |= dict.fromkeys(("found_inf", "inv_scale"), "*fp32" if unscaling else "constexpr")
    known = {"DTYPE": getattr(tl, dtype), "ROWS": rows, "COLUMNS": columns}
    known |= {} if unscaling else {"found_inf": None, "inv_scale": None}
    source = triton.compiler.ASTSource(
        kernel.scan, signature | dict.fromkeys(("DTYPE", "ROWS", "COLUMNS"), "constexpr"), known
    )
    return triton.compile(source, target, fused.options_for(target.backend, target.arch)), rows


@pytest.fixture(scope="module", autouse=True)
def compiler_cache(tmp_path_factory):
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def memory_in_use(cubin: bytes, path) -> dict[str, int]:
    """Registers, and bytes of stack, shared and local memory, as the CUDA tools read them from the binary."""
    path.write_bytes(cubin)
    tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
    text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


CUDA = [
    (capability, dtype)
    for capability in (70, 75, 80, 90, 100)
    for dtype in ("float32", "float64", "float16", "bfloat16")
    if dtype != "bfloat16" or capability >= 80  # before that it is left to torch
]


@pytest.mark.parametrize(("capability", "dtype"), CUDA)
def test_cuda_reads_and_writes_16_bytes_at_a_time_and_spills_nothing(capability, dtype, tmp_path):
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    kernel, rows = compiled(target, dtype)
    ptx = kernel.asm["ptx"]
    wide = r"\.global\S*\.(v4\.b32|v2\.b64)"
    assert [len(re.findall(access + wide, ptx)) for access in ("ld", "st")] == [rows, rows]
    assert "local" not in ptx
    assert ".ftz" not in ptx  # float32's own subnormals count, and torch keeps them
    used = memory_in_use(kernel.asm["cubin"], tmp_path / "kernel.cubin")
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["REG"] <= (
        168 if capability == 75 else 128
    )  # 3 or 4 programs of 128 threads on a multiprocessor


def test_bfloat16_is_rounded_by_the_instruction_that_torch_uses():
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    assert "cvt.rn.bf16" in compiled(target, "bfloat16")[0].asm["ptx"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_reading_only_writes_no_gradient(dtype, tmp_path):
    target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    kernel, rows = compiled(target, dtype, unscaling=False)
    wide = r"\.global\S*\.(v4\.b32|v2\.b64)"
    assert [len(re.findall(access + wide, kernel.asm["ptx"])) for access in ("ld", "st")] == [rows, 0]
    used = memory_in_use(kernel.asm["cubin"], tmp_path / "kernel.cubin")
    assert (used["STACK"], used["LOCAL"]) == (0, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_amd_reads_and_writes_16_bytes_at_a_time_and_spills_nothing(dtype):
    kernel, rows = compiled(triton.backends.compiler.GPUTarget("hip", "gfx942", 64), dtype)
    code = kernel.asm["amdgcn"]
    for access in ("load", "store"):  # one more may write the partial results
        assert len(re.findall(rf"\b(?:buffer|global)_{access}_dwordx4 v", code)) in (rows, rows + 1)
    assert re.findall(r"\.vgpr_spill_count: +(\d+)", code) == ["0"]
    assert re.findall(r"\.private_segment_fixed_size: (\d+)", code) == ["0"]  # no scratch memory
    assert re.findall(r"\.amdhsa_float_denorm_mode_32 (\d+)", code) == ["3"]  # subnormals are kept
