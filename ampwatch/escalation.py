"""When to look closer: which observers a run of non-finite losses calls for.

Attempts with a non-finite loss are counted per stream, since in a GAN neighbouring attempts
belong to different networks. Torch-free and without clock: a pure function of the attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

SEARCH_AT: Final = 2  # consecutive non-finite losses before the forward pass is searched
SEARCH_AGAIN: Final = 64  # further ones before it is searched again
MOST_MISSES: Final = (
    8  # searches of a stream that met a finite loss, and are made up for at the next that is not
)


class Escalation:
    """Counts consecutive non-finite losses, and remembers what they call for until it is taken."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}
        self._check = False
        self._search = -1
        self._searched: set[int] = set()  # streams whose next attempt is searched
        self._missed: dict[int, int] = {}  # how often by stream
        self._owed: set[int] = set()
        self._was_finite: set[int] = set()  # streams that have had a finite loss
        self._suspect = ""
        self._overflowed: dict[
            int, Sequence[int]
        ] = {}  # tensors of a stream's last attempt, if its loss is finite

    def add(self, stream: int, *, loss_is_finite: bool) -> None:
        """Add the next attempt of a stream; whether it was skipped does not matter: gradients may have been cleaned."""
        was_searched = stream in self._searched
        self._searched.discard(stream)
        if loss_is_finite:
            self._was_finite.add(stream)
            self._streaks[stream] = 0
            if was_searched:
                self._miss(stream)
            return
        streak = self._streaks[stream] = self._streaks.get(stream, 0) + 1
        self._check = self._check or streak & (streak - 1) == 0  # 1st, 2nd, 4th, 8th …
        due = streak >= SEARCH_AT and (streak - SEARCH_AT) % SEARCH_AGAIN == 0
        if stream in self._owed or (due and not was_searched):
            self._owed.discard(stream)
            self._search = stream

    def searched(self, stream: int, found: Mapping[str, Any]) -> None:
        """What a search has found: the data of its event. NaN from the first attempt on may come of the device."""
        origin = found.get("origin") or {}
        is_clean = not origin.get("input_n_nonfinite") and found.get("parameters_finite")
        if stream not in self._was_finite and origin.get("output_n_nan") and is_clean:
            self._suspect = str(origin.get("module") or "")

    def take_suspect(self) -> str:
        """The module to be computed once more in float32, empty for none; asked once."""
        wanted, self._suspect = self._suspect, ""
        return wanted

    def _miss(self, stream: int) -> None:
        """The loss that was to be looked at is finite: one that comes and goes is looked at when it comes again."""
        self._missed[stream] = self._missed.get(stream, 0) + 1
        if self._missed[stream] <= MOST_MISSES:
            self._owed.add(stream)

    def overflowed(self, stream: int, tensors: Sequence[int]) -> None:
        """The next attempt of a stream: tensors that are not finite although this rank's loss is; none is usual."""
        self._overflowed[stream] = tensors

    def take_overflowed(self, stream: int) -> Sequence[int]:
        """Of which tensors the local gradients are to be looked at in the stream's next attempt; asked once."""
        return self._overflowed.pop(stream, ())

    def take_check(self) -> bool:
        """Whether parameters and buffers are to be checked for inf and NaN; asked once."""
        wanted, self._check = self._check, False
        return wanted

    def take_search(self) -> int:
        """The stream whose next attempt is to be searched, -1 for none; asked once."""
        wanted, self._search = self._search, -1
        if wanted >= 0:
            self._searched.add(wanted)
        return wanted
