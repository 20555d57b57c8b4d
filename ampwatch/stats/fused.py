"""The Triton kernel from the host: all gradients of a (device, dtype) in one launch, with torch's unscale pass in it.

    found_inf, inv_scale = torch.zeros(1, device="cuda"), torch.full((1,), 2.0**-16, device="cuda")
    rows = unscale_with_statistics_(grads, found_inf, inv_scale)

replaces `torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)`, after which gradients,
`found_inf` and version counters are the same bit for bit, and answers what `reference.statistics_of(grads)` would
have said before. What the kernel cannot take (`handles`) goes through torch's op and the reference.

Nothing synchronises. Not to be called while a stream is captured. What can fail is done before a gradient is touched:
the first call for a dtype makes the same pass over one element of its own, compiling what there is to compile. What
fails later nevertheless is a `Touched`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from . import reference
from .dense import Dense
from .layout import WIDTH
from .tables import Table, host_of
from .touched import touching

OLDEST_TRITON: Final = (3, 6)
OLDEST_CUDA: Final = (7, 0)
NATIVE_BFLOAT16: Final = (8, 0)  # before it torch and Triton round NaN to different bits
TURING: Final = 75
KEPT_TABLES: Final = 32  # per thread; a GAN needs one for each network

Factors: TypeAlias = tuple[Tensor, Tensor]
"""found_inf and inv_scale."""
Places: TypeAlias = tuple[int, ...] | range
"""Of some gradients among all: hashable, to be part of a key."""
Launch: TypeAlias = Callable[[], None]


class _Kept(threading.local):
    """The tables of a thread, those used last at the end."""

    def __init__(self) -> None:
        self.tables: OrderedDict[tuple[object, ...], Table] = OrderedDict()


_kept = _Kept()


@cache
def available() -> bool:
    """Whether the kernel can run in this process: torch sees a GPU, and Triton is there and new enough.

    Compiles nothing and makes no CUDA context. Synchronisation: none.
    """
    if not torch.cuda.is_available():
        return False
    try:
        import triton
    except ImportError:
        return False
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= OLDEST_TRITON


def handles(grad: Tensor) -> bool:
    """Whether the kernel takes this gradient: a plain, dense tensor of a real dtype, on a GPU that can run it."""
    return Dense.of([grad]) is not None and _runs_on(grad.device, grad.dtype)


@torch.no_grad()
def statistics_of(grads: Sequence[Tensor]) -> Tensor:
    """As `reference.statistics_of`, reading each gradient once and writing none.

    Synchronisation: none.
    """
    return _pass_over(grads, None)


@torch.no_grad()
def unscale_with_statistics_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    """Unscale gradients in place as torch does, and take the statistics of what they were.

    Arguments:
        grads: as torch's op wants them: of one device and dtype.
        found_inf: one float32 there; set to 1 if any element is not finite, else left alone.
        inv_scale: one float32 there, by which they are multiplied. With 1 (fused optimizers) float32 and float64
            gradients are not written to.
    Returns: (n, WIDTH) float64 there, as `reference.statistics_of` before the call.
    Errors: those of torch's op, for gradients that it refuses; those of Triton, before anything is changed;
        `Touched` for any of a later time.
    Synchronisation: none.
    """
    return _pass_over(grads, (found_inf, inv_scale))


def _pass_over(grads: Sequence[Tensor], factors: Factors | None) -> Tensor:
    grads = Dense.of(grads) or grads
    ours, others = _split(grads)
    if not ours:
        return _by_torch(list(grads), factors)
    device = grads[next(iter(ours.values()))[0]].device
    with _on(device):
        for dtype in ours:
            _rehearse(device, dtype, factors is not None)
        out = torch.empty(len(grads), WIDTH, dtype=torch.float64, device=device)
        launches = [_prepare(grads, places, out, factors) for places in ours.values()]
        rest = [grads[i] for i in others]
        if rest:
            for i, row in zip(others, reference.statistics_of(rest), strict=True):
                out[i].copy_(row)
        with touching(factors is not None):
            if rest:
                _unscale_(rest, factors)
            for launch in launches:
                launch()
    return out


def _split(grads: Sequence[Tensor]) -> tuple[Mapping[torch.dtype, Places], Places]:
    """Places of the gradients that the kernel takes, by dtype, and of the others."""
    if isinstance(grads, Dense) and len(grads.dtypes) == 1:
        (dtype,) = grads.dtypes
        places = range(len(grads))
        return ({dtype: places}, ()) if _runs_on(grads[0].device, dtype) else ({}, tuple(places))
    ours: dict[torch.dtype, list[int]] = {}
    others: list[int] = []
    for i, grad in enumerate(grads):
        (ours.setdefault(grad.dtype, []) if handles(grad) else others).append(i)
    return {dtype: tuple(places) for dtype, places in ours.items()}, tuple(others)


def _by_torch(grads: list[Tensor], factors: Factors | None) -> Tensor:
    rows = reference.statistics_of(grads)
    _unscale_(grads, factors)
    return rows


def _unscale_(grads: list[Tensor], factors: Factors | None) -> None:
    if factors is not None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, *factors)


def _prepare(grads: Sequence[Tensor], places: Places, out: Tensor, factors: Factors | None) -> Launch:
    """All that may fail of a pass over gradients of one dtype; the pass itself is left to be called."""
    from . import triton_kernel as kernel

    chosen = Dense.of(grads if len(places) == len(grads) else [grads[i] for i in places])
    assert chosen is not None  # each is handled
    dtype, device = chosen[0].dtype, chosen[0].device
    table = _table(chosen, places, dtype, device)
    addresses = table.place(chosen.addresses)
    counts = torch.empty(table.programs, kernel.COUNT_WIDTH, dtype=torch.int32, device=device)
    reals = torch.empty(table.programs, 2, dtype=torch.float64, device=device)
    found_inf, inv_scale = factors or (None, None)
    rows, columns = kernel.tile_shape(dtype.itemsize)
    options = _options(device)
    if factors is not None:
        torch.autograd.graph.increment_version(chosen)

    def launch() -> None:
        if table.programs:
            kernel.scan[(table.programs,)](
                addresses, table.sizes, table.items, counts, reals, found_inf, inv_scale,
                DTYPE=kernel.dtype_named(str(dtype)), ROWS=rows, COLUMNS=columns, **options,
            )  # fmt: skip
        table.launched()
        kernel.gather[(table.tensors,)](table.sizes, table.firsts, table.rows, counts, reals, out, **options)

    return launch


def _table(grads: Dense, places: Places, dtype: torch.dtype, device: torch.device) -> Table:
    """The kept table for gradients of these sizes on the current stream, or a new one."""
    from . import triton_kernel as kernel

    sizes = grads.numels
    key = (device, _stream(device), dtype, sizes.tobytes(), places)
    table = _kept.tables.pop(key, None)
    if table is None:
        tile = kernel.tile_elements(dtype.itemsize)
        rows = np.array(places, np.int64)
        table = Table(sizes, rows, tile, kernel.MOST_TILES, device, host_of(device))
        while len(_kept.tables) >= KEPT_TABLES:
            _kept.tables.popitem(last=False)
    _kept.tables[key] = table
    return table


@cache
def _rehearse(device: torch.device, dtype: torch.dtype, unscaling: bool) -> None:
    """The pass over one element of our own: what does not compile or launch here would not with gradients either."""
    scratch = torch.zeros(1, dtype=dtype, device=device)
    factors = (torch.zeros(1, device=device), torch.ones(1, device=device)) if unscaling else None
    _prepare([scratch], range(1), torch.empty(1, WIDTH, dtype=torch.float64, device=device), factors)()


@cache
def _runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU can run the kernel for this dtype; the CPU can where Triton interprets."""
    from . import triton_kernel as kernel

    if device.type != "cuda":
        return device.type == "cpu" and kernel.INTERPRETED
    if torch.version.hip is not None:
        return True
    oldest = NATIVE_BFLOAT16 if dtype is torch.bfloat16 else OLDEST_CUDA
    return torch.cuda.get_device_capability(device) >= oldest


def options_for(backend: str, capability: int) -> dict[str, int | bool]:
    """How the kernels are compiled.

    Arguments:
        backend: `cuda` or `hip`.
        capability: of a CUDA device, 80 for 8.0.
    """
    if backend == "hip":
        return {"num_warps": 2, "enable_fp_fusion": True}  # 64 threads each; a tile is cut to 128
    options = {"num_warps": 4, "enable_fp_fusion": True}
    # 128 registers a thread let four programs share a multiprocessor, not three. Turing would spill with them.
    return options if capability == TURING else options | {"maxnreg": 128}


@cache
def _options(device: torch.device) -> dict[str, int | bool]:
    if device.type != "cuda":
        return {}  # interpreted
    major, minor = torch.cuda.get_device_capability(device)
    return options_for("cuda" if torch.version.hip is None else "hip", 10 * major + minor)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
