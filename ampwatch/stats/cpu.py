"""The fused pass on the CPU: the library of native/, where it was built, called through ctypes.

    found_inf, inv_scale = torch.zeros(1), torch.full((1,), 2.0**-16)
    rows = unscale_with_statistics_(grads, found_inf, inv_scale)

replaces `torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)`, after which gradients and
`found_inf` are the same bit for bit, and answers what `reference.statistics_of(grads)` would have said before. Memory
is read once and written once. What the library cannot take goes through torch's op and the reference.

It works on as many threads as torch does, and on the same ones: those of the OpenMP runtime that torch has loaded. A
runtime of its own would have threads of its own, and those that have just worked wait in a busy loop, on one core
with the others. In a forked child, where a runtime's threads are gone, the library starts some for each pass.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Final, TypeAlias

import torch
from torch import Tensor

from . import reference
from .dense import PLAIN, Dense
from .layout import SCALARS, WIDTH
from .library import INSTRUCTIONS, available, functions
from .pages import empty
from .touched import touching

__all__ = [
    "INSTRUCTIONS",
    "available",
    "best_instructions",
    "handles",
    "statistics_of",
    "unscale_with_statistics_",
]

_SHORT: Final = frozenset((torch.float16, torch.bfloat16))

Factors: TypeAlias = tuple[Tensor, Tensor]
"""found_inf and inv_scale."""

_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@cache
def best_instructions() -> str:
    """The last of `INSTRUCTIONS` that this processor has: the pass is made with them.

    Errors: OSError where the library was not built.
    """
    return INSTRUCTIONS[functions().ampwatch_instructions()]


def handles(grad: Tensor) -> bool:
    """Whether the library takes it: a plain tensor in main memory, dense in any order, of a real dtype."""
    return _on_cpu(Dense.of([grad])) is not None


@torch.no_grad()
def statistics_of(grads: Sequence[Tensor], *, instructions: str | None = None) -> Tensor:
    """As `reference.statistics_of`, reading each gradient once.

    Arguments:
        instructions: as for `unscale_with_statistics_`.
    Returns: (n, WIDTH) float64 on the CPU.
    Synchronisation: none.
    """
    return _pass_over(grads, None, instructions)


@torch.no_grad()
def unscale_with_statistics_(
    grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, *, instructions: str | None = None
) -> Tensor:
    """Unscale gradients in place as torch does, and take the statistics of what they were.

    Arguments:
        grads: tensors on the CPU; dtypes and shapes may differ.
        found_inf: (1,) float32; set to 1 if any element is not finite, else left alone.
        inv_scale: (1,) float32, by which they are multiplied.
        instructions: one of `INSTRUCTIONS` up to the best of this processor, which None stands for.
    Returns: (n, WIDTH) float64 on the CPU, as `reference.statistics_of` before the call.
    Errors: those of the reference, before anything is changed; those of torch's op where it has to take the whole
        list; `Touched` for any after the first write, as where that op refuses a gradient between those of the library.
    Synchronisation: none.
    """
    return _pass_over(grads, (found_inf, inv_scale), instructions)


def _pass_over(grads: Sequence[Tensor], factors: Factors | None, instructions: str | None) -> Tensor:
    if not available() or (factors is not None and not _usable(factors)):
        return _by_torch(grads, factors)
    code = _code(instructions)
    dense = _on_cpu(Dense.of(grads))
    if dense:
        return _by_library(dense, factors, code)
    ours = list(map(handles, grads))
    others = [grad for grad, mine in zip(grads, ours, strict=True) if not mine]
    if not any(ours) or (factors is not None and not all(map(_alone, others))):
        return _by_torch(grads, factors)
    return _by_both(grads, ours, factors, code)


def _on_cpu(dense: Dense | None) -> Dense | None:
    return dense if dense is not None and dense.place < 0 else None


def _alone(grad: Tensor) -> bool:
    """Whether torch's op, if it refuses it, has unscaled those before it; for others it refuses the whole list."""
    return (
        type(grad) in PLAIN
        and grad.is_cpu
        and grad.layout is torch.strided
        and not (grad.is_nested or grad.is_neg() or grad._is_zerotensor())
    )


def _usable(factors: Factors) -> bool:
    """Whether torch's op would take them, and NaN would not meet NaN: which of two comes out depends on its build."""
    return all(
        _alone(factor) and factor.dtype is torch.float32 and factor.numel() == 1 for factor in factors
    ) and not math.isnan(factors[1].item())


def _code(instructions: str | None) -> int:
    best = INSTRUCTIONS.index(best_instructions())
    code = best if instructions is None else INSTRUCTIONS.index(instructions)
    if code > best:
        raise ValueError(
            f"instructions: got {instructions!r}, this processor has up to {best_instructions()!r}"
        )
    return code


def _by_torch(grads: Sequence[Tensor], factors: Factors | None) -> Tensor:
    rows = reference.statistics_of(grads)
    _unscale_(grads, factors)
    return rows


def _unscale_(grads: Sequence[Tensor], factors: Factors | None) -> None:
    if factors is not None:
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), *factors)


def _by_both(grads: Sequence[Tensor], ours: Sequence[bool], factors: Factors | None, code: int) -> Tensor:
    """In the order of the list: where torch's op refuses a gradient, it has unscaled those before it."""
    rows = torch.from_numpy(empty(len(grads) * WIDTH)).view(-1, WIDTH)
    others = [i for i, mine in enumerate(ours) if not mine]
    rows[others] = reference.statistics_of([grads[i] for i in others])
    with touching(factors is not None):
        for _, run in groupby(range(len(grads)), ours.__getitem__):
            places = list(run)
            some = [grads[i] for i in places]
            dense = _on_cpu(Dense.of(some))
            if dense:
                rows[places] = _by_library(dense, factors, code)
            else:
                _unscale_(some, factors)
    return rows


def _by_library(grads: Dense, factors: Factors | None, code: int) -> Tensor:
    rows = torch.from_numpy(empty(len(grads) * WIDTH)).view(-1, WIDTH)
    found_inf, inv_scale = (factor.data_ptr() for factor in factors) if factors else (None, None)
    done = functions().ampwatch_pass(
        len(grads), grads.addresses.ctypes.data, grads.numels.ctypes.data, grads.formats,
        rows.data_ptr(), inv_scale, found_inf, torch.get_num_threads(), code, _team(),
    )  # fmt: skip
    if not done:
        return _by_torch(grads, factors)
    if factors is not None and not grads.dtypes.isdisjoint(_SHORT):
        with touching():
            _choose_nan(grads, rows, factors[1].item())
    return rows


def _choose_nan(grads: Sequence[Tensor], rows: Tensor, inv_scale: float) -> None:
    """Give NaN in 16-bit gradients the bits that torch's op gives them.

    They depend on its build and on the place of the element: vectors, and what is left of them, are rounded by
    different code. Multiplied by 1, what is no NaN stays what it is; whether it overflowed has been told already.
    """
    always = inv_scale == 0 or math.isinf(inv_scale)  # inf * 0 is NaN
    n_nan = rows[:, SCALARS.index("n_nan")].tolist()
    some = [g for g, n in zip(grads, n_nan, strict=True) if g.dtype.itemsize == 2 and (n or always)]
    torch._amp_foreach_non_finite_check_and_unscale_(
        some, torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    )


def _team() -> int | None:
    """The address of GOMP_parallel, by which compiled code enters an OpenMP runtime; None: the library's threads."""
    return None if _forked else _openmp()


@cache
def _openmp() -> int | None:
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)  # torch loads its dependencies for all to see
    return ctypes.cast(entry, ctypes.c_void_p).value if entry else None
