"""In which format gradients are computed: what is known of it, and when to look again. Torch-free, without clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Flags: TypeAlias = npt.NDArray[np.bool_]

LOOK_EVERY: Final = 1000  # attempts of an optimizer from one look at its gradients to the next


class Origins:
    """What looks at gradients have brought so far; a known origin is kept (docs/numerics.md, section 4).

    Written where numbers arrive, read by the training thread: the sets are replaced, never changed.
    """

    def __init__(self) -> None:
        self.known: frozenset[int] = frozenset()
        """Tensors whose gradients are known to be computed in float16 or in bfloat16."""
        self.float16: frozenset[int] = frozenset()
        """Those of them that are computed in float16."""
        self.clean: frozenset[int] = frozenset()
        """Optimizers that have had an attempt without inf and NaN."""
        self._is_float16: Flags = np.zeros(1, np.bool_)  # by tensor; the last stands for those beyond it

    def add(self, seen: Mapping[str, str]) -> None:
        """What a look has brought: the data of an `origin` event."""
        self.known |= {int(tensor) for tensor, origin in seen.items() if origin != "unknown"}
        self.float16 |= {int(tensor) for tensor, origin in seen.items() if origin == "float16"}
        table = np.zeros(max(self.float16, default=-1) + 2, np.bool_)
        table[list(self.float16)] = True
        self._is_float16 = table

    def are_float16(self, tensors: npt.NDArray[np.int64]) -> Flags:
        """Which of these tensors have gradients that are known to be computed in float16."""
        return self._is_float16.take(tensors, mode="clip")

    def add_clean(self, optimizers: Iterable[int]) -> None:
        """Optimizers that met neither inf nor NaN in an attempt."""
        if not self.clean.issuperset(optimizers):
            self.clean |= frozenset(optimizers)


class Schedule:
    """When the gradients of one optimizer are looked at, by its own attempts.

    Gradients that are NaN, infinite or zero throughout tell nothing: all of them in a burst of calibration, or at a
    scale far too low. So as long as nothing is known it is tried again at attempts 1, 2, 4, 8 … and after the first
    clean one; later every `LOOK_EVERY`.
    """

    def __init__(self) -> None:
        self._coming = 0
        self._was_clean = False

    def calls_after(self, *, clean: bool, is_known: Callable[[], bool]) -> bool:
        """An attempt has ended: whether to look at the gradients of the next.

        Arguments:
            clean: whether an attempt so far met neither inf nor NaN.
            is_known: whether the origin of some of these gradients is known; asked only where it matters.
        """
        self._coming += 1
        is_first_clean = clean and not self._was_clean
        self._was_clean = clean
        if self._coming % LOOK_EVERY == 0:
            return True
        is_power_of_two = self._coming & (self._coming - 1) == 0
        return (is_first_clean or is_power_of_two) and not is_known()
