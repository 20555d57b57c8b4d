"""The flight recorder: the statistics of the last attempts, left where the pass has put them.

Nothing is copied and nothing is launched to keep them. What of it is wanted later, because an attempt was skipped or
its loss was not finite, is sent from here (autopsy.py says which).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from torch import Tensor

ATTEMPTS: Final = 64
DEVICE_BYTES: Final = 8 << 20  # of a device's memory, and …
TENSOR_BYTES: Final = 20 << 10  # … for each tensor
HOST_BYTES: Final = 12 << 20  # where that memory is the host's


class FlightRecorder:
    """Keeps the statistics of up to `ATTEMPTS` attempts, fewer where they would take more than their share of memory.

    Training thread only. Nothing here synchronises.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[int, list[Tensor]] = OrderedDict()
        self.depth = ATTEMPTS
        """How many attempts like the last one may be kept."""

    def __len__(self) -> int:
        """Attempts that are kept."""
        return len(self._rows)

    def keep(self, attempt: int, rows: Sequence[Tensor]) -> None:
        """Keep the statistics of an attempt, (n, WIDTH) float64 on each device; the oldest go."""
        self._rows[attempt] = list(rows)
        self.depth = depth_for(rows)
        while len(self._rows) > self.depth:
            self._rows.popitem(last=False)

    def rows_of(self, attempt: int) -> list[Tensor] | None:
        """The statistics of an attempt; None where they are gone."""
        return self._rows.get(attempt)


def depth_for(rows: Sequence[Tensor]) -> int:
    """How many attempts like this one may be kept, at least one."""
    size = sum(each.nbytes for each in rows)
    if not size:
        return ATTEMPTS
    room = DEVICE_BYTES + TENSOR_BYTES * sum(map(len, rows))
    if all(each.is_cpu for each in rows):
        room = min(room, HOST_BYTES)
    return max(1, min(ATTEMPTS, room // size))
