"""When to look closer: which observers a run of non-finite losses calls for.

Attempts with a non-finite loss are counted per stream, since in a GAN neighbouring attempts
belong to different networks. Torch-free and without clock: a pure function of the attempts.
"""

from __future__ import annotations

from typing import Final

SEARCH_AT: Final = 2  # consecutive non-finite losses before the forward pass is searched
SEARCH_AGAIN: Final = 64  # further ones before it is searched again


class Escalation:
    """Counts consecutive non-finite losses, and remembers what they call for until it is taken."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}
        self._check = False
        self._search = -1

    def add(self, stream: int, *, loss_is_finite: bool) -> None:
        """Add the next attempt of a stream; whether it was skipped does not matter: gradients may have been cleaned."""
        if loss_is_finite:
            self._streaks[stream] = 0
            return
        streak = self._streaks[stream] = self._streaks.get(stream, 0) + 1
        self._check = self._check or streak & (streak - 1) == 0  # 1st, 2nd, 4th, 8th …
        if streak >= SEARCH_AT and (streak - SEARCH_AT) % SEARCH_AGAIN == 0:
            self._search = stream

    def take_check(self) -> bool:
        """Whether parameters and buffers are to be checked for inf and NaN; asked once."""
        wanted, self._check = self._check, False
        return wanted

    def take_search(self) -> int:
        """The stream whose next attempt is to be searched, -1 for none; asked once."""
        wanted, self._search = self._search, -1
        return wanted
