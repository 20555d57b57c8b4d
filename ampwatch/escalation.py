"""When to look closer: what a run of non-finite losses calls for, or a norm that fell steeply.

Attempts with a non-finite loss are counted per stream, since in a GAN neighbouring attempts
belong to different networks. Torch-free and without clock: a pure function of the attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

SEARCH_AT: Final = 2  # consecutive non-finite losses before the forward pass is searched
SEARCH_SKIPS: Final = 4  # consecutive skips with a finite loss and NaN gradients before it is, too
SEARCH_AGAIN: Final = 64  # further ones before it is searched again
COMES_AGAIN: Final = 32  # attempts from one non-finite loss to the next, of one that comes and goes
MARGIN: Final = 4  # attempts by which numbers of a device may be late
MOST_WAITS: Final = 4  # searches of a stream that wait for a loss that comes and goes
STEEP: Final = 8.0  # a factor by which a norm falls from one attempt to the next


class Wanted(NamedTuple):
    """A search that is called for: of so many of the stream's next attempts, each by itself."""

    stream: int
    attempts: int


class Escalation:
    """Counts non-finite losses, and remembers what they call for until it is taken.

    Two in a row call for a search of the next attempt. One that comes and goes is mostly gone in the next: where two
    came shortly after each other, the search waits for the third as long as lay between them. A loss that leaves out
    what is NaN, as of padding, stays finite while its gradients are NaN: four such skips in a row call for a search,
    as halving the scale cured nothing.
    """

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}
        self._nan_skips: dict[
            int, int
        ] = {}  # consecutive skips of a stream with a finite loss and NaN gradients
        self._check = False
        self._search: Wanted | None = None
        self._searched: dict[int, int] = {}  # how many of a stream's next attempts are searched
        self._attempts: dict[int, int] = {}  # of a stream so far
        self._begun: dict[
            int, int
        ] = {}  # the attempt at which its loss was last found to be not finite any more
        self._waits: dict[int, int] = {}  # searches that waited
        self._was_finite: set[int] = set()  # streams that have had a finite loss
        self._suspect = ""
        self._overflowed: dict[
            int, Sequence[int]
        ] = {}  # tensors of a stream's last attempt, if its loss is finite
        self._norms: dict[int, float] = {}  # of a stream's last attempt that has one
        self._fell: int | None = None

    def add(self, stream: int, *, loss_is_finite: bool, nan_skip: bool = False) -> None:
        """Add the next attempt of a stream.

        Arguments:
            loss_is_finite: whether the step was skipped does not matter: gradients may have been cleaned.
            nan_skip: a step was skipped, and gradients are NaN.
        """
        at = self._attempts[stream] = self._attempts.get(stream, 0) + 1
        was_searched = self._searched.get(stream, 0) > 0
        self._searched[stream] = self._searched.get(stream, 0) - was_searched
        if loss_is_finite:
            self._was_finite.add(stream)
            self._streaks[stream] = 0
            self._nan_skips[stream] = (self._nan_skips.get(stream, 0) + 1) * nan_skip
            if not was_searched and _is_due(self._nan_skips[stream], SEARCH_SKIPS):
                self._search = Wanted(stream, 1)
            return
        self._nan_skips[stream] = 0
        streak = self._streaks[stream] = self._streaks.get(stream, 0) + 1
        self._check = self._check or streak & (streak - 1) == 0  # 1st, 2nd, 4th, 8th …
        if not was_searched and _is_due(streak, SEARCH_AT):
            self._search = Wanted(stream, 1)
        if streak == 1:
            self._comes_and_goes(stream, at)

    def searched(self, stream: int, found: Mapping[str, Any]) -> None:
        """What a search has found: the data of its event. NaN from the first attempt on may come of the device."""
        origin = found.get("origin") or {}
        if found.get("outputs_finite") is False:
            self._waits[stream] = MOST_WAITS  # what was waited for has come
        is_clean = not origin.get("input_n_nonfinite") and found.get("parameters_finite")
        if stream not in self._was_finite and origin.get("output_n_nan") and is_clean:
            self._suspect = str(origin.get("module") or "")

    def take_suspect(self) -> str:
        """The module to be computed once more in float32, empty for none; asked once."""
        wanted, self._suspect = self._suspect, ""
        return wanted

    def _comes_and_goes(self, stream: int, at: int) -> None:
        """The loss is not finite after one that was: wait for the next, if the last time was not long ago."""
        apart, self._begun[stream] = at - self._begun.get(stream, -COMES_AGAIN), at
        waits = self._waits.get(stream, 0)
        if apart <= COMES_AGAIN and waits < MOST_WAITS and not self._searched.get(stream):
            self._waits[stream] = waits + 1
            self._search = Wanted(stream, apart + MARGIN)

    def overflowed(self, stream: int, tensors: Sequence[int]) -> None:
        """The next attempt of a stream: tensors that are not finite although this rank's loss is; none is usual."""
        self._overflowed[stream] = tensors

    def take_overflowed(self, stream: int) -> Sequence[int]:
        """Of which tensors the local gradients are to be looked at in the stream's next attempt; asked once."""
        return self._overflowed.pop(stream, ())

    def norm(self, stream: int, attempt: int, norm: float) -> None:
        """The L2 norm of the true gradient at the next attempt of a stream; NaN where it has none."""
        if norm > 0:
            if norm * STEEP <= self._norms.get(stream, 0.0):
                self._fell = attempt
            self._norms[stream] = norm

    def take_fall(self) -> int | None:
        """The attempt whose norm fell to an eighth of the one before, or less; None where none did. Asked once."""
        fell, self._fell = self._fell, None
        return fell

    def take_check(self) -> bool:
        """Whether parameters and buffers are to be checked for inf and NaN; asked once."""
        wanted, self._check = self._check, False
        return wanted

    def take_search(self) -> Wanted | None:
        """The search that is called for, None for none; asked once."""
        wanted, self._search = self._search, None
        if wanted is not None:
            self._searched[wanted.stream] = wanted.attempts
        return wanted


def _is_due(streak: int, begin: int) -> bool:
    """Whether a streak of so many attempts calls for a search: at `begin`, and every `SEARCH_AGAIN` from there."""
    return streak >= begin and (streak - begin) % SEARCH_AGAIN == 0
