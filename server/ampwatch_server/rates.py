"""How often one sender may come."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

_BURST_S: Final = 10.0  # of sending at the full rate may come at once: a job that catches up after an outage
_SENDERS: Final = 1 << 16  # that are remembered; of more, those that were seen longest ago start anew


class Rates:
    """A token bucket for each sender. Any thread.

    Arguments:
        per_s: requests a second in the long run; ten times as many may come at once.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._lock = threading.Lock()
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_s(self, sender: Hashable) -> float:
        """0 where a request of this sender may pass, which is counted; else seconds until the next one may."""
        now, most = self._clock(), self._per_s * _BURST_S
        with self._lock:
            left, at = self._left.pop(sender, (most, now))
            left = min(most, left + (now - at) * self._per_s)
            passes = left >= 1
            self._left[sender] = (left - 1 if passes else left, now)
            if len(self._left) > _SENDERS:
                self._left.popitem(last=False)
        return 0.0 if passes else (1 - left) / self._per_s
