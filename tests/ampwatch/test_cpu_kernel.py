"""The CPU kernel, with every set of instructions that this processor has, against the reference and torch's own op."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ampwatch
from ampwatch.stats import cpu, reference
from ampwatch.stats.layout import HIST_BINS, SCALARS, WIDTH
from ampwatch.stats.touched import Touched

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not cpu.available(), reason="the kernel was not built: no C compiler")

HERE = cpu.INSTRUCTIONS[: 1 + cpu.INSTRUCTIONS.index(cpu.best_instructions())] if cpu.available() else ()
every = pytest.mark.parametrize("instructions", HERE)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK = 4096
CHUNK = 2**16
SIZES = [
    0,
    1,
    3,
    31,
    32,
    33,
    127,
    128,
    129,
    255,
    256,
    257,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    CHUNK + 1,
    3 * CHUNK + 77,
]
SUM_SQ, MAX_ABS = SCALARS.index("sum_sq"), SCALARS.index("max_abs")
EDGES = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    2.0**-14,
    2.0**-24,
    2.0**-25,
    2.0**-48,
    65504.0,
    65520.0,
    65536.0,
]
inf, nan = math.inf, math.nan


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.dtype.itemsize])


def wild(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits at all; a fifth are on the grid of float16."""
    numbers = np.random.default_rng(seed).bytes(size * dtype.itemsize)
    grad = torch.from_numpy(np.frombuffer(numbers, f"i{dtype.itemsize}").copy()).view(dtype)
    grad[::5] = torch.linspace(-2, 3, len(grad[::5])).half().to(dtype)
    return grad


def gentle(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """As gradients are: finite, within some thirty binades."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size) * 1e-3).to(dtype)


def check(rows: Tensor, grads: list[Tensor]) -> None:
    """Equal to the reference: counts and max_abs exactly, sum_sq within 1e-5."""
    expected = reference.statistics_of(grads)
    others = [i for i in range(WIDTH) if i != SUM_SQ]
    assert torch.equal(rows[:, others], expected[:, others])
    torch.testing.assert_close(rows[:, SUM_SQ], expected[:, SUM_SQ], rtol=1e-5, atol=0)


def check_unscaling(grads: list[Tensor], inv_scale: float, instructions: str | None = None) -> Tensor:
    """Gradients, found_inf and version counters as torch's op leaves them, and the statistics of before."""
    theirs, found, factor = [grad.clone() for grad in grads], torch.zeros(2), torch.tensor([inv_scale])
    ours = [grad.clone() for grad in grads]
    rows = cpu.unscale_with_statistics_(ours, found[:1], factor, instructions=instructions)
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found[1:], factor)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(ours, theirs, strict=True))
    assert [grad._version for grad in ours] == [grad._version for grad in theirs]
    assert found[0] == found[1]
    check(rows, grads)
    return rows


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [wild, gentle])
def test_sizes(instructions, dtype, make):
    grads = [make(size, dtype, seed=size) for size in SIZES]
    check(cpu.statistics_of(grads, instructions=instructions), grads)


@every
@pytest.mark.parametrize("inv_scale", [1.0, 0.5, 2.0**-16, 1 / 3, -1e-3, 3e38, 1e-45, 0.0, inf, -inf, nan])
def test_unscaling_is_torchs(instructions, inv_scale):
    for dtype in DTYPES:
        check_unscaling([wild(size, dtype) for size in SIZES], inv_scale, instructions)
        check_unscaling([gentle(777, dtype), gentle(BLOCK, dtype)], inv_scale, instructions)


@every
@pytest.mark.parametrize("inv_scale", [1.0, 0.3, 2.0**-15, 2.0**-24, 700.0, 0.0, inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_a_16_bit_format(instructions, dtype, inv_scale):
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    check_unscaling([grad, grad[:-3].clone()], inv_scale, instructions)


@st.composite
def gradients(draw):
    """Any bits, with the edges of the formats more often than chance has them, and a run of one value."""
    dtype = draw(st.sampled_from(DTYPES))
    near = bits(torch.tensor(EDGES, dtype=dtype))
    edges = torch.cat([near - 1, near, near + 1]).tolist()
    limits = torch.iinfo(near.dtype)
    patterns = st.sampled_from(edges) | st.integers(limits.min, limits.max)
    run = [draw(patterns)] * draw(st.integers(0, 600))
    return torch.tensor(draw(st.lists(patterns, max_size=60)) + run, dtype=near.dtype).view(dtype)


@given(st.lists(gradients(), max_size=4), st.floats(width=32), st.sampled_from(HERE or [None]))
def test_any_bits_of_any_dtype_by_any_scale(grads, inv_scale, instructions):
    check_unscaling(grads, inv_scale, instructions)


@every
def test_by_hand(instructions):
    # 3 = 1.5 * 2^1 stands in bin 49; 2^-15 is subnormal in float16; 2^-26 + 2^-40 is on neither grid.
    grad = torch.tensor([3.0, -(2.0**-15), 2.0**-26 + 2.0**-40, 0.0, -0.0, inf, -inf, nan] * 10)
    row = cpu.statistics_of([grad], instructions=instructions)[0].tolist()
    assert row[:MAX_ABS] == [80, 20, 10, 20, 20, 10, 10, 10]
    assert row[MAX_ABS : SUM_SQ + 1] == [3, pytest.approx(10 * (9 + 2.0**-30), rel=1e-5)]
    assert {b: n for b, n in enumerate(row[-HIST_BINS:]) if n} == {49: 10, 33: 10, 22: 10}


@every
def test_just_below_powers_of_two(instructions):
    powers = torch.tensor([2.0**k for k in range(-40, 17)])
    grad = torch.cat(
        [powers, torch.nextafter(powers, torch.zeros(())), torch.nextafter(powers, torch.tensor(inf))]
    )
    check(cpu.statistics_of([grad.repeat(9)], instructions=instructions), [grad.repeat(9)])


@every
@pytest.mark.parametrize("value", [0.0, 1.0, 65536.0, 1e-45, 2.0**-25, 3e38])
def test_a_block_of_one_value(instructions, value):
    grad = torch.full((BLOCK,), value)
    check(cpu.statistics_of([grad], instructions=instructions), [grad])


@every
def test_exponents_that_span_more_than_a_word(instructions):
    grads = [
        torch.ldexp(torch.full((BLOCK,), 1.25), torch.arange(BLOCK) % span - 60) for span in (31, 32, 33, 99)
    ]
    check(cpu.statistics_of(grads, instructions=instructions), grads)


@every
def test_magnitudes_that_jump_from_block_to_block(instructions):
    sizes = [1e-44, 3e38, 1e-20, 0.0, 2.0**-14, 1e30, 2.0**-130, 1.0, 2.0, 8.0, 1e-9]
    grad = torch.cat([gentle(BLOCK, seed=i) * size for i, size in enumerate(sizes)])
    grads = [grad, grad.flip(0), grad[BLOCK // 2 :], grad[:: len(sizes)].contiguous()]
    check(cpu.statistics_of(grads, instructions=instructions), grads)


@every
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_zeros_among_what_spans_many_exponents(instructions, share):
    spans = torch.ldexp(gentle(3 * BLOCK + 5), torch.arange(3 * BLOCK + 5) % 61 - 30)
    grad = spans * (torch.from_numpy(np.random.default_rng(1).random(len(spans))) >= share)
    check(cpu.statistics_of([grad], instructions=instructions), [grad])


@every
@pytest.mark.parametrize("size", [1e-320, 1e-200, 2.0**-140, 2.0**-126, 1e-30, 1.0, 2.0**127.5, 1e39, 1e150])
def test_float64_beyond_float32(instructions, size):
    grads = [gentle(n, torch.float64, seed=n) * 1e3 * size for n in (BLOCK + 7, 40)]
    grads.append(grads[0].float().double())
    check(cpu.statistics_of(grads, instructions=instructions), grads)


@every
@pytest.mark.parametrize("size", [1e20, 1e-25, 3.4e38, 1e-38, 1e-45, 1.7])
def test_squares_beyond_float32(instructions, size):
    grad = torch.full((BLOCK + 1000,), size)
    (row,) = cpu.statistics_of([grad], instructions=instructions)
    assert row[SUM_SQ].item() == pytest.approx(len(grad) * grad[0].double().item() ** 2, rel=1e-5)


def test_the_result_does_not_depend_on_the_threads():
    grads = [
        gentle(3 * CHUNK + 5),
        wild(2 * CHUNK, torch.float32),
        *(gentle(n, seed=n) for n in range(900, 1000)),
    ]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(check_unscaling(grads, 2.0**-16).nan_to_num(-1.0))
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_thousands_of_small_tensors():
    check_unscaling([gentle(n % 70, seed=n) for n in range(5000)], 0.125)


def test_more_elements_than_an_int32_counts():
    grad = torch.from_numpy(np.zeros(2**31 + 5, np.float16))  # of pages that were never touched
    grad[-1] = 3.0
    row = cpu.statistics_of([grad])[0].tolist()
    assert row[:SUM_SQ] == [2**31 + 5, 0, 0, 2**31 + 4, 0, 0, 0, 0, 3.0]


def test_nothing():
    assert cpu.statistics_of([]).shape == (0, WIDTH)
    assert check_unscaling([], 0.5).shape == (0, WIDTH)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda x: x.view(5, 1, 24).permute(2, 1, 0),
        lambda x: x.flatten()[1:],
        lambda x: x[0, 0],
        lambda x: torch.nn.Parameter(x, requires_grad=True),
    ],
    ids=["transposed", "channels_last", "permuted", "misaligned", "scalar", "parameter"],
)
def test_dense_tensors_are_handled_in_any_order(view):
    grads = [view(gentle(120, seed=n).view(12, 10)) for n in range(2)]
    assert all(map(cpu.handles, grads))
    expected, found = (grads[1] * 0.25).detach().clone(), torch.zeros(1)
    check(
        cpu.unscale_with_statistics_(grads[1:], found, torch.tensor([0.25])),
        [view(gentle(120, seed=1).view(12, 10))],
    )
    assert torch.equal(grads[1], expected)


def test_elements_between_their_natural_addresses():
    memory = torch.zeros(4 * 1001, dtype=torch.uint8)
    grad = torch.from_numpy(np.frombuffer(memory.numpy(), np.float32, 1000, offset=1))
    grad.copy_(gentle(1000))
    check(cpu.statistics_of([grad]), [gentle(1000)])


class Wrapper(Tensor):
    """A tensor of somebody else's."""


OTHERS = {
    "strided": lambda: gentle(120)[::2],
    "subclass": lambda: gentle(8).as_subclass(Wrapper),
    "expanded": lambda: gentle(1).expand(7),
    "complex": lambda: torch.view_as_complex(gentle(120).view(60, 2)),
    "negated": lambda: torch.tensor([3 + 4j], dtype=torch.complex64).conj().imag,
    "integer": lambda: torch.ones(3, dtype=torch.int32),
    "sparse": lambda: torch.sparse_coo_tensor([[1, 1]], [4.0, -4.0], (5,), check_invariants=True),
    "unwritten": lambda: torch._efficientzerotensor((3,)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_handled_fares_as_by_torch(other):
    ours, theirs = ([gentle(700), OTHERS[other](), gentle(300)] for _ in range(2))
    outcomes = []
    for unscale_, grads in ((cpu.unscale_with_statistics_, ours), (_by_torch, theirs)):
        found = torch.zeros(1)
        try:
            unscale_(grads, found, torch.tensor([0.5]))
            outcomes.append(found.item())
        except (RuntimeError, NotImplementedError) as error:
            outcomes.append((type(error), str(error)))
        except Touched as touched:
            outcomes.append((type(touched.__cause__), str(touched.__cause__)))
    assert outcomes[0] == outcomes[1]
    assert [torch.equal(a, b) for a, b in zip(ours[::2], theirs[::2], strict=True)] == [True, True]


def _by_torch(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def test_handled_and_other_gradients_keep_their_rows():
    grads = [
        torch.full((3,), 2.0),
        torch.full((6,), 4.0)[::2],
        torch.full((5,), 8.0),
        torch.full((2,), 16.0)[::2],
    ]
    rows = cpu.unscale_with_statistics_(grads, torch.zeros(1), torch.tensor([0.5]))
    assert rows[:, MAX_ABS].tolist() == [2, 4, 8, 16]
    assert [grad[0].item() for grad in grads] == [1, 2, 4, 8]


def test_memory_that_is_listed_twice_is_unscaled_twice():
    grad = torch.full((1000,), 8.0)
    rows = cpu.unscale_with_statistics_([grad, grad[1:]], torch.zeros(1), torch.tensor([0.5]))
    assert rows[:, MAX_ABS].tolist() == [8, 8]
    assert grad[:2].tolist() == [4, 2]


def test_an_error_after_the_library_has_written_says_so(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cpu, "_choose_nan", broken)
    grad = torch.full((3,), 8.0, dtype=torch.float16)
    with pytest.raises(Touched) as caught:
        cpu.unscale_with_statistics_([grad], torch.zeros(1), torch.tensor([0.5]))
    assert (type(caught.value.__cause__), grad.tolist()) == (ZeroDivisionError, [4.0] * 3)


def test_found_inf_is_set_and_never_cleared():
    found, factor = torch.zeros(1), torch.tensor([0.5])
    cpu.unscale_with_statistics_([gentle(9), torch.tensor([1.0, nan])], found, factor)
    assert found.item() == 1
    cpu.unscale_with_statistics_([gentle(9)], found, factor)
    assert found.item() == 1


def test_overflow_by_unscaling_is_not_found():
    check_unscaling([torch.full((40,), 60000.0, dtype=torch.float16)], 4.0)


@pytest.mark.parametrize("factor", [torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.5, 0.5])])
def test_factors_that_torch_refuses_are_refused(factor):
    with pytest.raises(RuntimeError, match="inv_scale must be a"):
        cpu.unscale_with_statistics_([gentle(3)], torch.zeros(1), factor)


def test_instructions_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="not in tuple"):
        cpu.statistics_of([gentle(3)], instructions="sse9")


def run(program: str, *arguments: str) -> str:
    """In a process of its own."""
    command = [sys.executable, "-W", "error", "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


SUBNORMALS = """
import ctypes, platform, sys
import numpy as np, torch

def control():
    words = (ctypes.c_uint32 * 16)()
    ctypes.CDLL(None).fegetenv(words)
    return words[7] & 0xFFC0 if platform.machine() == "x86_64" else 0   # MXCSR without what has happened

def subnormals():
    return [float(np.float32(2**-140) / 2), (torch.full((9,), 2**-140) / 2)[8].item(), 5e-324 * 3]

before = control(), subnormals()
from ampwatch.stats import cpu
for threads in (1, 2):
    torch.set_num_threads(threads)
    grad = torch.full((600_000,), 2.0**-140)
    cpu.unscale_with_statistics_([grad], torch.zeros(1), torch.tensor([0.5]))
    assert (grad == 2.0**-141).all()
    assert (control(), subnormals()) == before == (before[0], [2**-141, 2**-141, 1.5e-323])
"""


def test_subnormals_stay_subnormal_in_the_process():
    run(SUBNORMALS)


FLUSHED = """
import sys
import torch
from ampwatch.stats import cpu, trial

def counted(grads):
    return [cpu.statistics_of(grads, instructions=i)[:, columns] for i in sys.argv[1:]]

columns = [i for i in range(74) if i != 9]   # squares of subnormals are nobody's loss
cases = list(trial.cases("cpu", large=9000, many=9))
before = [counted(case.grads) for case in cases]
assert torch.set_flush_denormal(True)
for case, rows in zip(cases, before):
    assert all(torch.equal(one, other) for one, other in zip(counted(case.grads), rows)), case.name
"""


def test_counts_are_the_same_in_a_process_that_flushes_subnormals():
    run(FLUSHED, *HERE)


FORK = """
import os, sys
import torch
from ampwatch.stats import cpu, reference

torch.set_num_threads(2)
grads = [torch.full((600_000,), 3.0)]
pass_over = lambda: cpu.unscale_with_statistics_(grads, torch.zeros(1), torch.tensor([0.5]))
threads = lambda: len(os.listdir("/proc/self/task"))
runtimes = lambda: {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line}
torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor([1.0]))
before = threads(), runtimes()
pass_over()
assert (threads(), runtimes()) == before, "no thread and no runtime besides torch's"
child = os.fork()
if child == 0:
    rows = pass_over()
    os._exit(0 if threads() == 1 and rows[0, 8] == 1.5 and grads[0][::200_000].tolist() == [0.75] * 3 else 1)
assert os.waitpid(child, 0)[1] == 0, "the child"
assert pass_over()[0, 8] == 1.5
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_forked_child_goes_on_and_no_thread_is_left():
    run(FORK)


def test_other_processors_than_these_get_plain_c(tmp_path):
    stats = without_library(tmp_path) / "stats"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = ["-DPLAIN", "-std=c11", "-O2", "-fPIC", "-shared", "-pthread"]
    subprocess.run([*compiler, *flags, stats / "native/pass.c", "-o", stats / "_cpu.so"], check=True)
    said = run(
        "import sys; sys.path.insert(0, sys.argv[1]); import torch; torch.set_num_threads(1);"
        "from ampwatch.stats import cpu, choose, trial;"
        "tried = choose.Statistics('cpu', cpu.statistics_of, cpu.unscale_with_statistics_);"
        "print(cpu.best_instructions(), {trial.difference(tried, c) for c in trial.cases('cpu', large=70_000)})",
        str(tmp_path),
    )
    assert said == "portable {''}\n"


def without_library(folder):
    """A copy of the package that is as it is installed where there is no C compiler."""
    return shutil.copytree(
        Path(ampwatch.__file__).parent, folder / "ampwatch", ignore=shutil.ignore_patterns("_cpu.*")
    )


def test_without_the_library_torch_and_the_reference_do_it(tmp_path):
    without_library(tmp_path)
    said = run(
        "import sys; sys.path.insert(0, sys.argv[1]); import torch; from ampwatch.stats import cpu;"
        "grads = [torch.full((3,), 8.0)]; found = torch.zeros(1);"
        "rows = cpu.unscale_with_statistics_(grads, found, torch.tensor([0.5]));"
        "print(cpu.available(), rows[0, 8].item(), grads[0].tolist(), found.item())",
        str(tmp_path),
    )
    assert said == "False 8.0 [4.0, 4.0, 4.0] 0.0\n"
