"""Gradients as kernels are told of them: where they lie, how many elements they have, of which dtype.

This is asked of a thousand tensors and more at every attempt, and would take longer than a kernel's own work on small
ones: a hundred nanoseconds for each question to each tensor. So it is asked once, of all of them in one call where
torch lets C ask (native/dense.h), and the answers go along with the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .library import (
    FORMATS,
    LOOK_CLOSER,
    available,
    describes_tensors,
    functions_on_objects,
    item_of_list,
)

Numbers: TypeAlias = npt.NDArray[np.int64]

PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))

_DTYPES: Final = dict(zip(FORMATS.values(), FORMATS, strict=True))
_CPU: Final = 1
_KINDS: Final = (_CPU, 2, 10)  # of DLPack; CUDA and ROCm, which torch calls by the same name

_dtype, _is_cpu, _is_cuda, _is_nested = map(attrgetter, ("dtype", "is_cpu", "is_cuda", "is_nested"))


class Dense(list[Tensor]):
    """Plain tensors of one device and of real dtypes, each of which fills a stretch of memory in any order.

    `addresses` and `numels` are (n,) int64; `formats` has a byte for each, of `library.FORMATS`; `dtypes` are those
    that occur, and `place` is the number of the GPU, or -1 for the CPU. Not to be changed.
    """

    addresses: Numbers
    numels: Numbers
    formats: bytes
    dtypes: frozenset[torch.dtype]
    place: int

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> Dense | None:
        """The list with what is known of it; None where one of them is anything else, or there are none."""
        if isinstance(grads, Dense):
            return grads
        if not grads or not PLAIN.issuperset(map(type, grads)):
            return None
        dense = cls(grads)
        try:
            known = dense.ask_at_once() if can_ask_at_once() else dense.ask_one_by_one()
        except RuntimeError:  # no memory of their own, or no strides: sparse, or wrapped inside torch
            return None
        return dense if known else None

    def ask_at_once(self) -> bool:
        """Learn it through DLPack; False where they are not what this class is for. RuntimeError as torch raises it."""
        n = len(self)
        table = np.empty(3 * n + 1, np.int64)  # one for all: to ask numpy for an address takes 2 µs
        device, formats = table[2 * n :], table[2 * n + 1 :].view(np.uint8)[:n]
        at, size = table.ctypes.data, table.itemsize
        done = functions_on_objects().ampwatch_describe(
            self, n, item_of_list(), describes_tensors(),
            at, at + size * n, at + size * (2 * n + 1), at + size * 2 * n,
        )  # fmt: skip
        kind, number = divmod(int(device[0]), 1 << 32)
        if not done or kind not in _KINDS:
            return False
        self.addresses, self.numels = table[:n], table[n : 2 * n]
        self.place = -1 if kind == _CPU else number
        told = formats.tobytes()
        if max(told) < LOOK_CLOSER:
            self._set_formats(told)
            return True
        closer = np.flatnonzero(formats & LOOK_CLOSER)
        formats &= ~np.uint8(LOOK_CLOSER)
        self._set_formats(formats.tobytes())
        return all(fills_its_memory(self[i]) for i in closer.tolist())

    def ask_one_by_one(self) -> bool:
        """The same of any torch, without the library: slower."""
        place = _place_of(self)
        if place is None or any(map(_is_nested, self)) or not set(map(_dtype, self)) <= FORMATS.keys():
            return False
        self.place = place
        self.addresses, self.numels = _each(Tensor.data_ptr, self), _each(Tensor.numel, self)
        self._set_formats(bytes([FORMATS[grad.dtype] for grad in self]))
        usual = all(map(Tensor.is_contiguous, self)) and 1 not in self.numels
        filled = usual or all(map(fills_its_memory, self))
        return filled and bool(self.addresses[self.numels > 0].all())

    def _set_formats(self, formats: bytes) -> None:
        self.formats = formats
        self.dtypes = frozenset(_DTYPES[code] for code in set(formats))


@cache
def can_ask_at_once() -> bool:
    """Whether torch and the library are such that it can be asked of all tensors in one call."""
    return available() and describes_tensors() is not None


def _each(ask: Callable[[Tensor], int], grads: Sequence[Tensor]) -> Numbers:
    return np.fromiter(map(ask, grads), np.int64, len(grads))


def _place_of(grads: Sequence[Tensor]) -> int | None:
    """The device they all lie on, None where there is no one, or one of another kind."""
    if all(map(_is_cpu, grads)):
        return -1
    places = set(map(Tensor.get_device, grads))
    return places.pop() if len(places) == 1 and all(map(_is_cuda, grads)) else None


def fills_its_memory(grad: Tensor) -> bool:
    """Whether the elements fill their memory, in any order, and stand there as they are read.

    Those that are negated when they are read are the imaginary part of a conjugate, every second of its numbers: to
    be contiguous there can be only one.
    """
    if grad.is_contiguous() and grad.numel() != 1:
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(grad.stride(), grad.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return not grad.is_neg()
