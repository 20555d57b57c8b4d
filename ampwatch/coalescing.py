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


def sums_of(parameters: Iterable[Tensor], grads: Iterable[Tensor]) -> tuple[Sum, ...]:
    """The sparse float16 gradients that torch coalesces before it checks them."""
    return tuple(
        Sum(parameter, grad._values(), grad.float().coalesce().half()._values())
        for parameter, grad in zip(parameters, grads, strict=True)
        if grad.is_sparse and grad.dtype is torch.float16 and not grad.is_coalesced()
    )


@torch.no_grad()
def overflow(sums: Sequence[Sum], index: Callable[[Tensor], int]) -> Observation:
    """Event `sparse_overflow`; nothing is recorded where no sum overflowed. Synchronisation: none."""
    flags = [each.values.isfinite().all() & ~each.added.isfinite().all() for each in sums]
    tensors = [index(each.parameter) for each in sums]
    return Observation("sparse_overflow", gathered(flags), partial(_told, tensors))


def _told(tensors: Sequence[int], numbers: Numbers) -> dict[str, Any]:
    overflown = [tensor for tensor, flag in zip(tensors, numbers, strict=True) if flag]
    return {"tensors": overflown} if overflown else {}
