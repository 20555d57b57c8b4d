"""The statistics of gradients in plain torch: the definition that every other implementation must equal.

One row of `layout.WIDTH` float64 values for each tensor (docs/numerics.md, section 3). Nothing here synchronises
with the device: no value is read on the host, and every shape is known there.

How. Small tensors are gathered, large ones are cut, so that the number of torch calls follows the number of
elements and not the number of tensors. A float is taken as what it is, sign, exponent and mantissa: |s| is its
bits without the sign, and every count that is asked for follows from how many elements stand in each *cell*,

    cell = exponent + (s is off the float16 grid) * EXPONENTS + (s is off the bfloat16 grid) * 2 * EXPONENTS

with NaN set apart from infinity by an exponent of its own. All thresholds of the definition (2^-14, 2^-24, the
edges of the bins) are powers of two, so counting by exponent is exact where a float log2 is not. What is left,
max_abs and sum_sq, is reduced over blocks of `BLOCK` elements first, then over the blocks of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from .layout import HIST_BINS, HIST_LOG2_MIN, SCALARS, WIDTH

BLOCK: Final = 64
GATHERED: Final = 1 << 16  # elements; a larger tensor is tallied by itself
CUT_CPU: Final = (
    1 << 17
)  # elements tallied at once: their working set, about 24 bytes each, should stay in cache
CUT_DEVICE: Final = 1 << 22  # a device wants few launches; this bounds the memory at about 100 MB
CELLS_AT_ONCE: Final = 1 << 22  # 32 MiB of counters


@dataclass(frozen=True)
class _Format:
    """A floating-point format as its bits. Every smaller format is widened to one of the two below, exactly."""

    real: torch.dtype
    bits: torch.dtype
    mantissa: int
    bias: int

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.mantissa

    @property
    def magnitude(self) -> int:
        """Mask of everything but the sign."""
        return self.infinity | ((1 << self.mantissa) - 1)

    @property
    def sign(self) -> int:
        """Place of the sign bit."""
        return self.magnitude.bit_length()

    @property
    def exponents(self) -> int:
        """0 (zero and subnormal) to 2·bias (finite), 2·bias + 1 (infinity), 2·bias + 2 (NaN)."""
        return 2 * self.bias + 3

    @property
    def cells(self) -> int:
        return 4 * self.exponents


_FLOAT32 = _Format(torch.float32, torch.int32, mantissa=23, bias=127)
_FLOAT64 = _Format(torch.float64, torch.int64, mantissa=52, bias=1023)
_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class _Piece:
    """Elements `start` to `stop` of tensor number `tensor`, and the zeros that fill its last block.

    The zeros have the dtype that the elements are widened to.
    """

    tensor: int
    start: int
    stop: int
    padding: Tensor

    def of(self, flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
        flat = flats[self.tensor]
        size = self.stop - self.start
        part = flat if size == flat.numel() else flat.narrow(0, self.start, size)
        if part.dtype is not self.padding.dtype:  # cat would widen it too, but not inside autocast
            part = part.to(self.padding.dtype)
        return (part, self.padding) if self.padding.numel() else (part,)


@dataclass(frozen=True)
class _Chunk:
    """Pieces that are tallied at once: of one tensor, or the whole of several small ones."""

    pieces: tuple[_Piece, ...]
    owner: Tensor  # (blocks,) int64: the tensor that a block belongs to
    first_cell: Tensor  # (blocks, 1), dtype of the bits: the first cell of that tensor


@dataclass(frozen=True)
class _Plan:
    """Where the elements of tensors of given sizes go. It depends on the sizes only, and is kept."""

    chunks: tuple[_Chunk, ...]
    numel: Tensor  # (n,) float64
    padding: Tensor  # (n,) float64: zeros that were added


@dataclass(frozen=True)
class _Tally:
    """What has been counted so far, for n tensors."""

    count: Tensor  # (n * cells,) float64
    sum_sq: Tensor  # (n,) float64
    peak: Tensor  # (n,) bits of the largest finite magnitude; they are ordered as the magnitudes are


def statistics(grad: Tensor) -> Tensor:
    """The statistics of one gradient.

    Arguments:
        grad: float16, bfloat16, float32, float64 or complex (taken as its real view) of any shape and strides; of
            a sparse tensor the values as they stand, not coalesced.
    Returns: (WIDTH,) float64 on the tensor's device, in the order of `stats/layout.py`. sum_sq is that of float64
        arithmetic (of float64 gradients it overflows above 1e154).
    Synchronisation: none.
    """
    return statistics_of([grad]).squeeze(0)


@torch.no_grad()
def statistics_of(grads: Sequence[Tensor]) -> Tensor:
    """The statistics of several gradients on one device.

    Arguments:
        grads: as for `statistics`; dtypes and shapes may differ.
    Returns: (n, WIDTH) float64 on their device; (0, WIDTH) on the CPU for no gradient.
    Synchronisation: none.
    """
    if not grads:
        return torch.empty(0, WIDTH, dtype=torch.float64, device="cpu")
    wide = [i for i, grad in enumerate(grads) if grad.dtype in _WIDE]
    if not wide:
        return _rows(grads, _FLOAT32)
    if len(wide) == len(grads):
        return _rows(grads, _FLOAT64)
    narrow = [i for i, grad in enumerate(grads) if grad.dtype not in _WIDE]
    rows = [*_rows([grads[i] for i in narrow], _FLOAT32), *_rows([grads[i] for i in wide], _FLOAT64)]
    return torch.stack(
        [row for _, row in sorted(zip(narrow + wide, rows, strict=True), key=lambda pair: pair[0])]
    )


def _rows(grads: Sequence[Tensor], fmt: _Format) -> Tensor:
    """The statistics of gradients that `fmt` holds exactly, a few hundred tensors at a time."""
    most = CELLS_AT_ONCE // fmt.cells
    if len(grads) > most:
        return torch.cat([_rows(grads[i : i + most], fmt) for i in range(0, len(grads), most)])
    flats = [_flat(grad) for grad in grads]
    first = flats[0]
    # A plan made of fake or other wrapped tensors serves their mode only, and is not kept.
    plan_for = _kept_plan if type(first) is Tensor else _plan
    plan = plan_for(tuple([flat.numel() for flat in flats]), first.device, fmt)
    tally = _empty_tally(len(flats), first.device, fmt)
    for chunk in plan.chunks:
        _add(tally, chunk, flats, fmt)
    return _decode(tally, plan, fmt)


def _flat(grad: Tensor) -> Tensor:
    """All elements as one real vector, in any order."""
    if grad.layout is not torch.strided:
        grad = grad._values() if grad.layout is torch.sparse_coo else grad.values()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    return grad.detach().reshape(-1)


def _empty_tally(n: int, device: torch.device, fmt: _Format) -> _Tally:
    return _Tally(
        torch.zeros(n * fmt.cells, dtype=torch.float64, device=device),
        torch.zeros(n, dtype=torch.float64, device=device),
        torch.zeros(n, dtype=fmt.bits, device=device),
    )


def _add(tally: _Tally, chunk: _Chunk, flats: Sequence[Tensor], fmt: _Format) -> None:
    """Count the elements of a chunk. The one place where they are read."""
    size = torch.cat([part for piece in chunk.pieces for part in piece.of(flats)])
    bits = size.view(fmt.bits).bitwise_and_(fmt.magnitude)  # in place: `size` is |s| from here on
    beyond = bits - fmt.infinity  # negative if finite, 0 if infinite, positive if NaN
    finite = (beyond >> fmt.sign).bitwise_and_(bits).view(-1, BLOCK)
    cell = (bits >> fmt.mantissa).add_(beyond.clamp_(0, 1))
    cell.add_(_off_grid(size, bits, torch.float16), alpha=fmt.exponents)
    cell.add_(_off_grid(size, bits, torch.bfloat16), alpha=2 * fmt.exponents)
    cell.view(-1, BLOCK).add_(chunk.first_cell)
    one = torch.ones((), dtype=torch.float64, device=size.device)
    tally.count.index_add_(0, cell, one.expand(cell.numel()))
    norm = torch.linalg.vector_norm(finite.view(fmt.real), dim=1, dtype=torch.float64)
    tally.sum_sq.index_add_(0, chunk.owner, norm.square_())
    tally.peak.scatter_reduce_(0, chunk.owner, finite.amax(1), "amax")


def _off_grid(size: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where a finite value does not survive a round trip through `dtype`, else 0; 0 or 1 for NaN."""
    back = size.to(dtype).to(size.dtype).view(bits.dtype)
    # The clamp is the cheapest way from "any bit differs" to 1. A NaN may come back negative: then it is 0.
    return back.bitwise_xor_(bits).clamp_(0, 1)


def _decode(tally: _Tally, plan: _Plan, fmt: _Format) -> Tensor:
    """From cells to the columns of the layout."""
    cells = tally.count.view(-1, 2, 2, fmt.exponents)  # tensor, off bfloat16, off float16, exponent
    special = 2 * fmt.bias + 1  # the exponent of infinity; NaN's is the next
    by_exponent = cells.sum((1, 2))
    zeros = cells.select(1, 0).select(1, 0).select(1, 0)  # on both grids, which no subnormal is
    by_exponent.select(1, 0).sub_(zeros)
    finite = cells.narrow(3, 0, special)
    upto = by_exponent.narrow(1, 0, special).cumsum(1)  # non-zero finite elements up to an exponent
    columns = {
        "numel": plan.numel,
        "n_inf": by_exponent.select(1, special),
        "n_nan": by_exponent.select(1, special + 1),
        "n_zero": zeros - plan.padding,
        "n_subnormal": upto.select(1, fmt.bias - 15),
        "n_below": upto.select(1, fmt.bias - 25),
        "n_offgrid": finite.select(2, 1).sum((1, 2)),
        "n_offgrid_bf16": finite.select(1, 1).sum((1, 2)),
        "max_abs": tally.peak.view(fmt.real).double(),
        "sum_sq": tally.sum_sq,
    }
    low = fmt.bias + HIST_LOG2_MIN
    edges = upto.narrow(1, low, HIST_BINS - 1)  # the upper edge of every bin but the last
    hist = torch.diff(
        edges, prepend=torch.zeros_like(zeros).unsqueeze(1), append=upto.narrow(1, special - 1, 1)
    )
    return torch.cat([torch.stack([columns[name] for name in SCALARS], 1), hist], 1)


def _plan(sizes: tuple[int, ...], device: torch.device, fmt: _Format) -> _Plan:
    """How tensors of these sizes are gathered and cut.

    It is built by fills alone: a list copied to a device would wait for the device. (Here as elsewhere `narrow` and
    `select` stand for indexing, which cannot be tried with the fake tensors of a device that is not there.)
    """
    fill = torch.zeros(BLOCK, dtype=fmt.real, device=device)
    chunks = tuple(_chunk(pieces, device, fmt) for pieces in _gather(sizes, fill))
    numel = _repeat([1] * len(sizes), list(sizes), torch.float64, device)
    padding = _repeat([1] * len(sizes), [-size % BLOCK for size in sizes], torch.float64, device)
    return _Plan(chunks, numel, padding)


_kept_plan = lru_cache(maxsize=64)(_plan)


def _gather(sizes: Sequence[int], fill: Tensor) -> Iterator[list[_Piece]]:
    """The pieces of each chunk. An empty tensor has none."""
    cut = CUT_CPU if fill.device.type == "cpu" else CUT_DEVICE
    small: list[_Piece] = []
    held = 0
    for i, size in enumerate(sizes):
        pieces = [_piece(i, start, min(start + cut, size), fill) for start in range(0, size, cut)]
        if size > GATHERED:
            yield from ([piece] for piece in pieces)
            continue
        if held + size > cut:
            yield small
            small, held = [], 0
        small += pieces
        held += size
    if small:
        yield small


def _piece(tensor: int, start: int, stop: int, fill: Tensor) -> _Piece:
    return _Piece(tensor, start, stop, fill.narrow(0, 0, (start - stop) % BLOCK))


def _chunk(pieces: Sequence[_Piece], device: torch.device, fmt: _Format) -> _Chunk:
    blocks = [-(-(piece.stop - piece.start) // BLOCK) for piece in pieces]
    owner = _repeat(blocks, [piece.tensor for piece in pieces], torch.int64, device)
    return _Chunk(tuple(pieces), owner, (owner * fmt.cells).to(fmt.bits).unsqueeze(1))


def _repeat(times: Sequence[int], values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Each value as many times as said, one after another."""
    runs = [
        torch.full((n,), value, dtype=dtype, device=device) for n, value in zip(times, values, strict=True)
    ]
    if len(runs) == 1:  # a large tensor's: one value in memory
        return runs[0].narrow(0, 0, 1).expand(times[0])
    return torch.cat(runs)
