"""What every softmax of a forward pass is given: rows that are masked altogether, rows whose scores overflowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .guard import guard
from .hooks import Numbers, gathered, is_plain

MOST_CALLS: Final = 1024
_SOFTMAX: Final = (torch.ops.aten._softmax, torch.ops.aten._log_softmax)


class SoftmaxRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: counts the rows of each softmax that hold nothing but -inf, and those with +inf or NaN.

    Of these, rows with +inf tell of an overflow; rows of NaN and -inf without it tell of a mask, as 0 · -inf is NaN.

    Every operation runs as it would without. No synchronisation.

    Arguments:
        where: names the module at work.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where
        self.modules: list[str] = []
        self.rows: list[int] = []
        self.counts: list[Tensor] = []  # (4,) each: masked, overflowed, infinite, undefined

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what a softmax is given, and call it."""
        if func.overloadpacket in _SOFTMAX and len(self.modules) < MOST_CALLS:
            with guard("observers.SoftmaxRows"):
                self._look(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _look(self, scores: Tensor, dim: int) -> None:
        if not is_plain(scores) or not scores.numel() or not scores.ndim:
            return
        top = scores.amax(dim)
        self.modules.append(self._where())
        self.rows.append(top.numel())
        infinite = (scores == torch.inf).any(dim)
        undefined = top.isnan() & (scores == -torch.inf).any(dim) & ~infinite
        counts = (top == -torch.inf, ~(top < torch.inf), infinite, undefined)
        self.counts.append(gathered([count.sum() for count in counts]))


def first_bad(modules: Sequence[str], rows: Sequence[int], numbers: Numbers) -> dict[str, Any] | None:
    """The first softmax with a masked or an overflowed row, None without one; `numbers` are its four counts, each."""
    counts = numbers.reshape(-1, 4).astype(int)
    bad = np.flatnonzero(counts.any(axis=1))
    if not len(bad):
        return None
    i = int(bad[0])
    counted = zip(("masked", "overflowed", "infinite", "undefined"), counts[i].tolist(), strict=True)
    return {"module": modules[i], "rows": rows[i], **dict(counted)}
