"""Looks at some elements of a gradient: in which windows, and at which elements. A look costs about ten operations."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .hooks import is_plain, local

LOOKS: Final = 4  # windows at a time, which are judged together …
ENOUGH: Final = 3  # … and of which so many have to agree
AT_FIRST: Final = 2 * LOOKS  # windows, as skips may take some of them …
EVERY: Final = 64  # … and then the first ones of so many
SAMPLED: Final = 4096  # elements


def is_due(windows: int) -> bool:
    """Whether the window behind so many is looked at."""
    return windows < AT_FIRST or windows % EVERY < LOOKS


def sample_of(parameter: Tensor) -> Tensor | None:
    """A copy of the first elements of its gradient: (n,) float64 on its device; None where it has none that is plain and real."""
    grad = None if parameter.grad is None else local(parameter.grad)
    if grad is None or not is_plain(grad) or grad.layout is not torch.strided or grad.is_complex():
        return None
    with torch.no_grad():
        return grad.flatten()[:SAMPLED].to(torch.float64, copy=True)
