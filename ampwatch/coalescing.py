"""Sparse float16 gradients: values that are finite one by one may overflow as torch adds those of equal indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .hooks import Numbers, Observation, gathered


class Sum(NamedTuple):
    """The values of a sparse gradient as backward left them, and as torch checks them: added up by index."""

    parameter: Tensor
    values: Tensor
    added: Tensor


@torch.no_grad()
def coalesce(parameters: Iterable[Tensor], coalesced: Callable[[Tensor], Tensor]) -> tuple[Sum, ...]:
    """Coalesce the sparse float16 gradients in place of torch, which finds it done: it is done once.

    Arguments:
        parameters: with a gradient.
        coalesced: a gradient as torch's method does it.
    """
    sums = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.is_sparse and grad.dtype is torch.float16 and not grad.is_coalesced():
            parameter.grad = added = coalesced(grad)
            sums.append(Sum(parameter, grad._values(), added._values()))
    return tuple(sums)


@torch.no_grad()
def overflow(sums: Sequence[Sum], index: Callable[[Tensor], int]) -> Observation:
    """Event `sparse_overflow`; nothing is recorded where no sum overflowed. Synchronisation: none."""
    flags = [each.values.isfinite().all() & ~each.added.isfinite().all() for each in sums]
    tensors = [index(each.parameter) for each in sums]
    return Observation("sparse_overflow", gathered(flags), partial(_told, tensors))


def _told(tensors: Sequence[int], numbers: Numbers) -> dict[str, Any]:
    overflown = [tensor for tensor, flag in zip(tensors, numbers, strict=True) if flag]
    return {"tensors": overflown} if overflown else {}
