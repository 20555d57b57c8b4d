"""Gradients as kernels are told of them: where they lie, how many elements they have, of which dtype.

This is asked of a thousand tensors and more at every attempt, and takes longer than a kernel's own work on small
ones. So each question is put to all of them by a function of C, once, and the answers go along with the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers: TypeAlias = npt.NDArray[np.int64]

DTYPES: Final = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN: Final = frozenset((Tensor, torch.nn.Parameter))

_dtype, _is_cpu, _is_cuda, _is_nested, _nbytes = map(
    attrgetter, ("dtype", "is_cpu", "is_cuda", "is_nested", "nbytes")
)


class Dense(list[Tensor]):
    """Plain tensors of one device and of real dtypes, each of which fills a stretch of memory in any order.

    `addresses` and `numels` are (n,) int64; `dtypes` are those that occur, and `place` is the number of the GPU, or -1
    for the CPU. Not to be changed.
    """

    addresses: Numbers
    numels: Numbers
    dtypes: frozenset[torch.dtype]
    place: int

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> Dense | None:
        """The list with what is known of it; None where one of them is anything else, or there are none."""
        if isinstance(grads, Dense):
            return grads
        dtypes = frozenset(map(_dtype, grads))
        if not (dtypes and PLAIN.issuperset(map(type, grads)) and dtypes <= DTYPES):
            return None
        place = _place_of(grads)
        if place is None or any(map(_is_nested, grads)):
            return None
        try:
            addresses = _each(Tensor.data_ptr, grads)
            numels = _numels(grads, dtypes)
            usual = all(map(Tensor.is_contiguous, grads)) and 1 not in numels
            if not (usual or all(map(_fills_its_memory, grads))) or not addresses[numels > 0].all():
                return None
        except RuntimeError:  # no memory of their own, or no strides: sparse, or wrapped inside torch
            return None
        dense = cls(grads)
        dense.addresses, dense.numels, dense.dtypes, dense.place = addresses, numels, dtypes, place
        return dense


def _each(ask: Callable[[Tensor], int], grads: Sequence[Tensor]) -> Numbers:
    return np.fromiter(map(ask, grads), np.int64, len(grads))


def _numels(grads: Sequence[Tensor], dtypes: frozenset[torch.dtype]) -> Numbers:
    if len(dtypes) > 1:
        return _each(Tensor.numel, grads)
    (dtype,) = dtypes
    return _each(_nbytes, grads) // dtype.itemsize  # the size in bytes is answered faster


def _place_of(grads: Sequence[Tensor]) -> int | None:
    """The device they all lie on, None where there is no one, or one of another kind."""
    if all(map(_is_cpu, grads)):
        return -1
    places = set(map(Tensor.get_device, grads))
    return places.pop() if len(places) == 1 and all(map(_is_cuda, grads)) else None


def _fills_its_memory(grad: Tensor) -> bool:
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
