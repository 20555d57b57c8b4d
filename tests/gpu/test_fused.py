"""The fused pass on a real GPU, against torch's op there and the reference on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ampwatch import doctor
from ampwatch.settings import Settings
from ampwatch.stats import fused, reference, trial
from ampwatch.stats.choose import Statistics, weigh
from ampwatch.stats.layout import SCALARS
from ampwatch.stats.library import FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

DEVICE = "cuda"
SUM_SQ = SCALARS.index("sum_sq")
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def wild(size: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all, NaN of every kind among them; a fifth are on the 16-bit grids."""
    integers = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integers)
    grad = torch.randint(limits.min, limits.max, (size,), dtype=integers, device=DEVICE).view(dtype)
    grad[::5] = torch.randn(len(grad[::5]), device=DEVICE).half().to(dtype)
    return grad


def finite(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(size, device=DEVICE) * torch.rand(size, device=DEVICE).exp2()).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    integers = INTEGERS[one.dtype.itemsize]
    return torch.equal(one.view(integers), other.view(integers))


def check(rows: Tensor, grads: list[Tensor]) -> None:
    expected, rows = reference.statistics_of([grad.cpu() for grad in grads]), rows.cpu()
    others = [i for i in range(rows.shape[1]) if i != SUM_SQ]
    assert torch.equal(rows[:, others], expected[:, others])
    torch.testing.assert_close(rows[:, SUM_SQ], expected[:, SUM_SQ], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_the_trial_of_the_doctor_is_passed(dtype):
    tried = Statistics("triton", fused.statistics_of, fused.unscale_with_statistics_)
    assert [trial.difference(tried, case) for case in trial.cases(DEVICE, [dtype])] == [""] * 6


def test_auto_takes_it_once_the_doctor_has_proved_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.zeros(1, device=DEVICE)  # CUDA is at work
    assert weigh("auto", DEVICE).name == "reference"
    found = {check.name: check for check in doctor.checks(Settings.load(environ={}, dir=tmp_path))}
    assert (found["triton pass"].state, weigh("auto", DEVICE).name) == ("ok", "triton")
    assert found["chosen pass"].says.startswith("triton for training on cuda: ")


def test_what_is_not_dense_goes_through_torch():
    base = finite(120)
    grads = [base[::2], base.view(12, 10).t().clone(), base[:1].expand(5), finite(7, torch.float64)]
    assert [fused.handles(grad) for grad in grads] == [False, True, False, True]
    check(fused.statistics_of(grads), grads)


def test_beyond_2_31_elements():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of device memory")
    grad = torch.ones(2**31 + 5, dtype=torch.float16, device=DEVICE)
    grad[-1] = math.inf
    row = fused.unscale_with_statistics_(
        [grad], found_inf := torch.zeros(1, device=DEVICE), torch.full((1,), 0.5, device=DEVICE)
    )[0].tolist()
    assert (row[0], row[1], row[SUM_SQ], row[len(SCALARS) + 48]) == (2**31 + 5, 1, 2**31 + 4, 2**31 + 4)
    assert (found_inf.item(), grad[0].item(), grad[-2].item()) == (1.0, 0.5, 0.5)


def test_new_addresses_at_every_step():
    held, rows = [], []
    for i in range(50):  # the host runs ahead of the device, as it does in training
        grads = [torch.full((n,), float(i + 1), device=DEVICE) for n in (100_000, 17)]
        held += grads
        rows.append(fused.statistics_of(grads)[:, SCALARS.index("max_abs")])
    assert torch.stack(rows).tolist() == [[i + 1.0, i + 1.0] for i in range(50)]


def test_the_same_gradients_give_the_same_bits():
    grads = [finite(1_000_003), wild(70_001, torch.float32)]
    first = fused.statistics_of(grads)
    assert all(same_bits(fused.statistics_of(grads), first) for _ in range(5))


def test_on_a_stream_of_its_own():
    grads = [finite(100_003)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rows = fused.statistics_of(grads)
    torch.cuda.current_stream().wait_stream(stream)
    check(rows, grads)


def test_nothing_synchronises():
    grads, inv_scale, found_inf = [finite(1000)], torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    fused.unscale_with_statistics_(grads, found_inf, inv_scale)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for size in (1000, 1000, 4097, 77):
            fused.unscale_with_statistics_([finite(size), finite(3)], found_inf, inv_scale)
            fused.statistics_of([finite(size)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
