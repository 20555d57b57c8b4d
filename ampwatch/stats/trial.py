"""A pass put to the test: against the reference on the CPU, against torch's own op, and against the clock.

What `ampwatch doctor` does with each pass. The gradients are drawn from a generator of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import reference
from .choose import Statistics
from .layout import SCALARS
from .library import FORMATS

DTYPES: Final = tuple(FORMATS)
LARGE: Final = (1 << 24) + 1
SIZES: Final = (0, 1, 2, 3, 7, 8, 9, 31, 33, 127, 129, 2047, 2049, 4095, 4096, 4097, 65_535, 65_537)
MANY: Final = 3000
INVERSES: Final = (2.0**-16, 0.3, 1.0, 2.0**-126, 0.0, torch.inf)
TIMED_SIZES: Final = [768] * 100 + [768 * 768] * 48
"""Elements of what is timed: 28 M, those of a small GPT."""

_SUM_SQ: Final = SCALARS.index("sum_sq")
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Stopwatch: TypeAlias = Callable[[Callable[[], object]], float]
"""Median time of a call in microseconds, on the device."""


class Case(NamedTuple):
    """Gradients of one dtype, and what they are unscaled by."""

    name: str
    grads: list[Tensor]
    inverses: Sequence[float] = (2.0**-16,)


def cases(
    device: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
    *,
    sizes: Sequence[int] = SIZES,
    many: int = MANY,
    large: int = LARGE,
) -> Iterator[Case]:
    """One after another, as the large ones fill memory.

    Arguments:
        sizes: elements of gradients, each at four alignments.
        many: gradients of the longest list.
        large: elements of the largest gradient.
    """
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        draw = _Draw(device, dtype)
        yield Case(f"any bits of {name}", [draw.bits(n) for n in (10_003, 5, 1)], INVERSES)
        sized = [draw.reals(n + 3)[skip : skip + n] for n in sizes for skip in range(4)]
        yield Case(f"{name} of many sizes, and at odd addresses", sized, (0.3,))
        yield Case(f"{many:,} gradients of {name}", [draw.reals(37) for _ in range(many)])
        yield Case(f"{name} of all magnitudes", list(draw.edges()))
        yield Case(f"{name} in other orders", list(draw.views()))
        yield Case(f"{large:,} elements of {name}", [draw.reals(large)])


class Verdict(NamedTuple):
    """Whether a pass is right and worth taking, and what was compared and measured, or what is wrong with it."""

    holds: bool
    says: str


def verdict(tried: Statistics, device: str, stopwatch: Stopwatch, given: Iterable[Case]) -> Verdict:
    """All of the trial: every case, then the clock. The pass must take less time than torch's own and the reference.

    Never raises: what fails, for whatever reason, does not hold.
    """
    try:
        return _verdict(tried, device, stopwatch, given)
    except Exception as error:  # noqa: BLE001 - a kernel that cannot be compiled, launched or timed
        return Verdict(False, f"it has failed: {error!r}")


def _verdict(tried: Statistics, device: str, stopwatch: Stopwatch, given: Iterable[Case]) -> Verdict:
    lists = 0
    for case in given:
        if wrong := difference(tried, case):
            return Verdict(False, wrong)
        lists += 1
    torchs, ours, references = times_us(tried, device, stopwatch)
    measured = (
        f"{sum(TIMED_SIZES) / 1e6:.0f} M elements take {ours:,.0f} us, torch's own pass {torchs:,.0f} us, "
        f"and the reference {references:,.0f} us more"
    )
    if ours >= torchs + references:
        return Verdict(False, f"equal to its definition, but not worth it: {measured}")
    return Verdict(True, f"equal to its definition in {lists} lists of gradients; {measured}")


def difference(tried: Statistics, case: Case) -> str:
    """What of a pass over these gradients is not as it is defined; empty if nothing is."""
    expected = reference.statistics_of([grad.cpu() for grad in case.grads])
    first, again = (tried.compute(case.grads) for _ in range(2))
    if wrong := _differs(first.cpu(), expected):
        return f"{case.name}: {wrong}"
    if not _same(first, again):
        return f"{case.name}: the same gradients have other statistics the second time"
    if tried.unscale is None:
        return ""
    before = [grad.clone() for grad in case.grads]
    for inverse in case.inverses:
        if wrong := _unscales_otherwise(tried, case.grads, inverse, expected):
            return f"{case.name}, by {inverse:g}: {wrong}"
        for grad, was in zip(case.grads, before, strict=True):
            grad.copy_(was)
    return ""


def times_us(tried: Statistics, device: str, stopwatch: Stopwatch) -> tuple[float, float, float]:
    """Of torch's own pass, of the tried one, and of the reference, over 28 M elements of float32."""
    grads = [torch.full((n,), 2.0**-9, device=device) for n in TIMED_SIZES]
    found_inf, inverse = torch.zeros(1, device=device), torch.full((1,), 1 + 2.0**-20, device=device)
    unscale = tried.unscale or (lambda grads, *_: tried.compute(grads))
    return (
        stopwatch(lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)),
        stopwatch(lambda: unscale(grads, found_inf, inverse)),
        stopwatch(lambda: reference.statistics_of(grads)),
    )


def by_events(work: Callable[[], object], rounds: int = 9) -> float:
    """A stopwatch for CUDA."""
    times: list[float] = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


class _Draw:
    """Gradients of one dtype on one device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator("cpu").manual_seed(0)

    def bits(self, size: int) -> Tensor:
        """Any at all, non-finite ones among them; a fifth are numbers of float16."""
        integers = _INTEGERS[self._dtype.itemsize]
        limits = torch.iinfo(integers)
        drawn = torch.randint(limits.min, limits.max, (size,), dtype=integers, generator=self._generator)
        grad = drawn.view(self._dtype)
        grad[::5] = torch.randn(len(grad[::5]), generator=self._generator).half().to(self._dtype)
        return grad.to(self._device)

    def reals(self, size: int) -> Tensor:
        """As gradients are."""
        return (torch.randn(size, generator=self._generator) * 1e-3).to(self._device, self._dtype)

    def edges(self) -> Iterator[Tensor]:
        """Powers of two, the numbers next to them, and squares beyond float32."""
        powers = torch.exp2(torch.arange(-149.0, 128.0, dtype=torch.float64)).to(self._dtype)
        for step in (-1, 0, 1):
            yield (powers.view(_INTEGERS[self._dtype.itemsize]) + step).view(self._dtype).to(self._device)
        for size in (1e20, 1e-25, 3e38, 1e-38, 1e-44):
            yield torch.full((1001,), size).to(self._device, self._dtype)

    def views(self) -> Iterator[Tensor]:
        """Dense in another order, and with gaps."""
        base = self.reals(120)
        yield base.view(12, 10).t()
        yield base.view(2, 3, 4, 5).to(memory_format=torch.channels_last)
        yield self.reals(120)[::2]


def _unscales_otherwise(tried: Statistics, ours: list[Tensor], inverse: float, expected: Tensor) -> str:
    device = ours[0].device
    theirs, factor = [grad.clone() for grad in ours], torch.full((1,), inverse, device=device)
    flags = [torch.zeros(1, device=device) for _ in range(2)]
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, flags[0], factor)
    assert tried.unscale is not None
    rows = tried.unscale(ours, flags[1], factor)
    if not all(map(_same, [*ours, flags[1]], [*theirs, flags[0]])):
        return "gradients are not unscaled as torch does"
    return _differs(rows.cpu(), expected)


def _differs(rows: Tensor, expected: Tensor) -> str:
    if not torch.allclose(rows[:, _SUM_SQ], expected[:, _SUM_SQ], rtol=1e-5, atol=0):
        return "sum_sq is not what the reference computes"
    rows = rows.clone()
    rows[:, _SUM_SQ] = expected[:, _SUM_SQ]
    return "" if torch.equal(rows, expected) else "statistics are not what the reference computes"


def _same(one: Tensor, other: Tensor) -> bool:
    """The same bits, but any NaN for NaN: which one comes out of an operation is the processor's own affair."""
    integers = _INTEGERS[one.dtype.itemsize]
    bits = [torch.where(each.isnan(), torch.nan, each).contiguous().view(integers) for each in (one, other)]
    return torch.equal(*bits)
