"""The statistics pass as two Triton kernels, equal to `reference.py` and fused with torch's unscale pass.

`scan` reads every gradient of one dtype once: it unscales in place as torch's own kernel does, bit for bit, and counts
what it has read. A *work item* is up to `MOST_TILES` tiles of one tensor and one program of the grid; it leaves one
row of partial results. `gather` adds the rows of each tensor and writes the columns of `layout.py`. Only counts, maxima
and sums in a fixed order are added, so the same gradients give the same bits.

How one read suffices. A float is taken as its bits; all thresholds of the definition are powers of two, so the
histogram by exponent gives the counts below 2^-14 and 2^-24, and the zeros as what it leaves over. Three counts that
remain share one int, ten bits each. Squares are taken of values divided by a power of two, that of the largest
magnitude so far, so float32 neither overflows nor vanishes. A tile that holds a non-finite element is rare: it is
counted apart and set to zero before the rest.

Accesses are 16 bytes wide. The compiler must be told so, on the pointer *after* its cast from the integer of the
table. Tiles count from the 16-byte boundary at or below the first element; only the first and last tile of a tensor
can be partial, and these take masked, narrow accesses, so a misaligned tensor costs the same.
"""

# Triton reads the annotations of kernels: they name what is known when a kernel is compiled, and nothing else.
from typing import Final

import triton
import triton.language as tl

from .layout import HIST_BINS, HIST_LOG2_MIN, SCALARS, WIDTH

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run under Triton's interpreter, on tensors of the CPU (TRITON_INTERPRET=1 at import)."""

THREADS: Final = 128
ACCESS_BYTES: Final = 16
COUNTS: Final = 4  # n_inf, n_nan, n_offgrid, n_offgrid_bf16; the histogram follows them
COUNT_WIDTH: Final = COUNTS + HIST_BINS
MOST_TILES: Final = 120  # per work item: 8 rows of 120 tiles stay below the 2^10 of a packed count
GATHERED_ROWS: Final = 64

_THREADS = tl.constexpr(THREADS)
_ACCESS = tl.constexpr(ACCESS_BYTES)
_COUNT_WIDTH = tl.constexpr(COUNT_WIDTH)
_GATHERED_ROWS = tl.constexpr(GATHERED_ROWS)
_BINS = tl.constexpr(HIST_BINS)
_LOWEST = tl.constexpr(127 + HIST_LOG2_MIN)  # exponent, biased as in float32, of the first bin
_SUBNORMAL_BIN = tl.constexpr(-14 - HIST_LOG2_MIN)  # the first bin of float16's normal numbers
_BELOW_BIN = tl.constexpr(-24 - HIST_LOG2_MIN)  # the first bin of its subnormal numbers
# Three counts in one int, ten bits each.
_OFFGRID_ONE = tl.constexpr(1)
_OFFGRID_BF16_ONE = tl.constexpr(1 << 10)
_NONZERO_ONE = tl.constexpr(1 << 20)
_FIELD = tl.constexpr((1 << 10) - 1)
_WIDTH = tl.constexpr(WIDTH)
_SCALARS = tl.constexpr(len(SCALARS))
_NUMEL = tl.constexpr(SCALARS.index("numel"))
_INF = tl.constexpr(SCALARS.index("n_inf"))
_NAN = tl.constexpr(SCALARS.index("n_nan"))
_ZERO = tl.constexpr(SCALARS.index("n_zero"))
_SUBNORMAL = tl.constexpr(SCALARS.index("n_subnormal"))
_BELOW = tl.constexpr(SCALARS.index("n_below"))
_OFFGRID = tl.constexpr(SCALARS.index("n_offgrid"))
_OFFGRID_BF16 = tl.constexpr(SCALARS.index("n_offgrid_bf16"))
_MAX_ABS = tl.constexpr(SCALARS.index("max_abs"))
_SUM_SQ = tl.constexpr(SCALARS.index("sum_sq"))


def tile_shape(itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile: one access of every thread is a row; rows keep a thread at 32 registers of data."""
    return (4 if itemsize == 2 else 8), THREADS * ACCESS_BYTES // itemsize


def tile_elements(itemsize: int) -> int:
    """Elements of a tile of a dtype of so many bytes."""
    rows, columns = tile_shape(itemsize)
    return rows * columns


def dtype_named(name: str) -> object:
    """Triton's dtype for the name of torch's, such as `torch.float32`."""
    return getattr(tl, name.removeprefix("torch."))


@triton.jit
def _bits(x, DTYPE: tl.constexpr):
    """The bits of |x|, of float64 or else of float32, as integers; they are ordered as the magnitudes are."""
    if DTYPE == tl.float64:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    elif DTYPE == tl.bfloat16:  # the upper half of a float32
        return (x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) << 16
    else:
        return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _infinity(DTYPE: tl.constexpr):
    return 0x7FF0000000000000 if DTYPE == tl.float64 else 0x7F800000


@triton.jit
def _magnitude(bits, DTYPE: tl.constexpr):
    return bits.to(tl.float64 if DTYPE == tl.float64 else tl.float32, bitcast=True)


@triton.jit
def _unscaled(x, inverse, DTYPE: tl.constexpr):
    """torch's arithmetic: in float32 for everything but float64."""
    if DTYPE == tl.float64:
        return x * inverse.to(tl.float64)
    else:
        return (x.to(tl.float32) * inverse).to(DTYPE)


@triton.jit
def _read_and_unscale(
    tile, start, skip, stop, inverse, write, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The elements of a tile as they were, zero outside of the tensor; unscaled in memory."""
    TILE: tl.constexpr = ROWS * COLUMNS
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if (start >= skip) & (start + TILE <= stop):
        x = tl.load(tile + offsets)
        if write:
            tl.store(tile + offsets, _unscaled(x, inverse, DTYPE))
    else:
        first = tl.maximum(skip - start, 0).to(tl.int32)
        last = tl.minimum(stop - start, TILE).to(tl.int32)
        inside = (offsets >= first) & (offsets < last)
        x = tl.load(tile + offsets, mask=inside, other=0.0)
        if write:
            tl.store(tile + offsets, _unscaled(x, inverse, DTYPE), mask=inside)
    return x


@triton.jit
def _classes(bits, DTYPE: tl.constexpr):
    """Three flags of finite elements, packed for addition: off the float16 grid, off bfloat16's, not zero."""
    size = _magnitude(bits, DTYPE)
    packed = tl.where(bits != 0, _NONZERO_ONE, 0)
    if DTYPE != tl.float16:
        packed += tl.where(size.to(tl.float16).to(size.dtype) != size, _OFFGRID_ONE, 0)
    if DTYPE == tl.float64:
        narrow = size.to(tl.float32)
        on_grid = (narrow.to(tl.float64) == size) & ((narrow.to(tl.int32, bitcast=True) & 0xFFFF) == 0)
        packed += tl.where(on_grid, 0, _OFFGRID_BF16_ONE)
    elif DTYPE != tl.bfloat16:
        packed += tl.where((bits & 0xFFFF) != 0, _OFFGRID_BF16_ONE, 0)
    return packed


@triton.jit
def _histogram(bits, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Elements by exponent, the ends clamped; zeros stand in the first bin."""
    mantissa: tl.constexpr = 52 if DTYPE == tl.float64 else 23
    lowest: tl.constexpr = _LOWEST + 896 if DTYPE == tl.float64 else _LOWEST
    one: tl.constexpr = 1 << mantissa  # of the exponent
    clamped = tl.minimum(tl.maximum(bits, lowest * one), (lowest + _BINS) * one - 1)
    return tl.histogram(((clamped >> mantissa).to(tl.int32) - lowest).reshape(TILE), _BINS)


@triton.jit
def _power_of_two(exponent):
    """2^exponent in float32, for -126 to 127."""
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _without_non_finite(bits, found_inf, DTYPE: tl.constexpr):
    """The bits with zero for what is not finite; and how many were infinite, how many NaN."""
    infinity = _infinity(DTYPE)
    if found_inf is not None:
        tl.store(found_inf, 1.0)  # by many programs, all the same value: as torch's kernel does
    n_inf = tl.sum((bits == infinity).to(tl.int32))
    n_nan = tl.sum((bits > infinity).to(tl.int32))
    return tl.where(bits >= infinity, 0, bits), n_inf, n_nan


@triton.jit
def _add_squares(squares, exponent, bits, top, DTYPE: tl.constexpr):
    """Sums, by column, of the squares of the values over 2^exponent; the exponent rises to that of `top`."""
    size = _magnitude(bits, DTYPE)
    if DTYPE == tl.float64:
        return squares + tl.sum(size * size, 0), exponent
    else:
        raised = tl.maximum(exponent, tl.minimum(top >> 23, 253) - 127)
        size *= _power_of_two(-raised)
        faded = squares * _power_of_two(tl.maximum(2 * (exponent - raised), -126))
        return faded + tl.sum(size * size, 0), raised


@triton.jit(do_not_specialize_on_alignment=["addresses", "sizes", "items", "found_inf", "inv_scale"])
def scan(
    addresses,
    sizes,
    items,
    counts,
    reals,
    found_inf,
    inv_scale,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Unscale and count one work item a program.

    Arguments:
        addresses, sizes: (n,) int64, first byte and number of elements of each tensor.
        items: (programs, 3) int64: the tensor, its first tile, and the tile at which to stop.
        counts: (programs, COUNT_WIDTH) int32, written.
        reals: (programs, 2) float64, written: the largest magnitude, and the sum of squares.
        found_inf: float32, set to 1 if anything is not finite; or None.
        inv_scale: float32; or None, and then nothing is unscaled.
        DTYPE, ROWS, COLUMNS: of the tensors, and of a tile.
    """
    TILE: tl.constexpr = ROWS * COLUMNS
    BITS: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    SQUARES: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    item = tl.program_id(0)
    tensor = tl.load(items + 3 * item)
    address = tl.load(addresses + tensor)
    base = tl.multiple_of((address - address % _ACCESS).to(tl.pointer_type(DTYPE)), _ACCESS)
    skip = address % _ACCESS // (DTYPE.primitive_bitwidth // 8)
    stop = skip + tl.load(sizes + tensor)
    inverse = 1.0 if inv_scale is None else tl.load(inv_scale)
    # As in torch, values are left as they are where the factor is 1; in 16 bits they make the way to float32 and back.
    write = False if inv_scale is None else (inverse != 1.0) | (DTYPE.primitive_bitwidth == 16)

    packed = tl.zeros([COLUMNS], tl.int32)
    histogram = tl.zeros([_BINS], tl.int32)
    squares = tl.zeros([COLUMNS], SQUARES)
    exponent = tl.zeros((), tl.int32) - 127
    peak = tl.zeros((), BITS)
    n_inf = 0
    n_nan = 0
    lanes = 0
    for number in range(
        tl.load(items + 3 * item + 1), tl.minimum(tl.load(items + 3 * item + 2), tl.cdiv(stop, TILE))
    ):
        start = number * TILE
        x = _read_and_unscale(base + start, start, skip, stop, inverse, write, DTYPE, ROWS, COLUMNS)
        bits = _bits(x, DTYPE)
        top = tl.max(bits)
        if top >= _infinity(DTYPE):
            bits, inf_here, nan_here = _without_non_finite(bits, found_inf, DTYPE)
            n_inf += inf_here
            n_nan += nan_here
            top = tl.max(bits)
        packed += tl.sum(_classes(bits, DTYPE), 0)
        histogram += _histogram(bits, DTYPE, TILE)
        squares, exponent = _add_squares(squares, exponent, bits, top, DTYPE)
        peak = tl.maximum(peak, top)
        lanes += TILE

    zeros = lanes - tl.sum(packed // _NONZERO_ONE)
    bins = tl.arange(0, _BINS)
    row = counts + _COUNT_WIDTH * item
    tl.store(row, n_inf)
    tl.store(row + 1, n_nan)
    tl.store(row + 2, tl.sum(packed & _FIELD))
    tl.store(row + 3, tl.sum(packed // _OFFGRID_BF16_ONE & _FIELD))
    tl.store(row + 4 + bins, histogram - tl.where(bins == 0, zeros, 0))
    unit = ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    total = tl.sum(squares).to(tl.float64)
    tl.store(reals + 2 * item, _magnitude(peak, DTYPE).to(tl.float64))
    tl.store(reals + 2 * item + 1, total if DTYPE == tl.float64 else total * unit * unit)


@triton.jit(do_not_specialize_on_alignment=["sizes", "firsts", "rows", "out"])
def gather(sizes, firsts, rows, counts, reals, out):
    """Add the partial results of one tensor a program.

    Arguments:
        sizes: (n,) int64. firsts: (n + 1,) int64, the first work item of each tensor, and their number.
        rows: (n,) int64, the row of `out` that belongs to each tensor.
        counts, reals: as `scan` wrote them.
        out: (any, WIDTH) float64, written.
    """
    tensor = tl.program_id(0)
    step = tl.arange(0, _GATHERED_ROWS)
    bins = tl.arange(0, _BINS)
    histogram = tl.zeros([_BINS], tl.int64)
    n_inf = tl.zeros((), tl.int64)
    n_nan = tl.zeros((), tl.int64)
    offgrid = tl.zeros((), tl.int64)
    offgrid_bf16 = tl.zeros((), tl.int64)
    peak = tl.zeros((), tl.float64)
    sum_sq = tl.zeros((), tl.float64)
    end = tl.load(firsts + tensor + 1)
    for first in range(tl.load(firsts + tensor), end, _GATHERED_ROWS):
        item = first + step
        there = item < end
        row = counts + _COUNT_WIDTH * item
        n_inf += tl.sum(tl.load(row, mask=there, other=0).to(tl.int64))
        n_nan += tl.sum(tl.load(row + 1, mask=there, other=0).to(tl.int64))
        offgrid += tl.sum(tl.load(row + 2, mask=there, other=0).to(tl.int64))
        offgrid_bf16 += tl.sum(tl.load(row + 3, mask=there, other=0).to(tl.int64))
        block = tl.load(row[:, None] + 4 + bins[None, :], mask=there[:, None], other=0)
        histogram += tl.sum(block.to(tl.int64), 0)
        peak = tl.maximum(peak, tl.max(tl.load(reals + 2 * item, mask=there, other=0.0)))
        sum_sq += tl.sum(tl.load(reals + 2 * item + 1, mask=there, other=0.0))

    numel = tl.load(sizes + tensor)
    to = out + _WIDTH * tl.load(rows + tensor)
    tl.store(to + _NUMEL, numel.to(tl.float64))
    tl.store(to + _INF, n_inf.to(tl.float64))
    tl.store(to + _NAN, n_nan.to(tl.float64))
    tl.store(to + _ZERO, (numel - n_inf - n_nan - tl.sum(histogram)).to(tl.float64))
    tl.store(to + _SUBNORMAL, tl.sum(tl.where(bins < _SUBNORMAL_BIN, histogram, 0)).to(tl.float64))
    tl.store(to + _BELOW, tl.sum(tl.where(bins < _BELOW_BIN, histogram, 0)).to(tl.float64))
    tl.store(to + _OFFGRID, offgrid.to(tl.float64))
    tl.store(to + _OFFGRID_BF16, offgrid_bf16.to(tl.float64))
    tl.store(to + _MAX_ABS, peak)
    tl.store(to + _SUM_SQ, sum_sq)
    tl.store(to + _SCALARS + bins, histogram.to(tl.float64))
