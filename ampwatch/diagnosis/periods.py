"""Single skipped attempts with a finite loss at equal distances, as of a loss that is computed now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from .episodes import Episode
from .moments import Moment

GAPS: Final = 4  # equal ones in a row
GAPS_OF_LARGE: Final = 3  # … if the loss of each skip stands out
AFTER_GROWTH: Final = 3  # attempts by which a period is longer than the growth interval; a probe comes sooner
AFTER_GROWTH_OF_LARGE: Final = 2  # … a probe at once; of losses that stand out no later one is taken for it


class Periodic(NamedTuple):
    """Such skips: the first, the distance, how many there are, and the newest."""

    first: Moment
    attempts: int
    skips: int
    last: Moment


class _Skip(NamedTuple):
    at: Moment
    is_large: bool


@dataclass(slots=True)
class LoneSkips:
    """The newest single skips of a stream, and the first row of them that has a period."""

    newest: deque[_Skip] = field(default_factory=lambda: deque(maxlen=GAPS + 1))
    found: Periodic | None = None

    def add(self, episode: Episode, interval: int) -> None:
        """Take in an episode that has ended."""
        if not _is_lone(episode):
            return
        self.newest.append(_skip_of(episode))
        seen = _period(self.newest, interval)
        if seen and (self.found is None or seen.attempts == self.found.attempts):
            self.found = (self.found or seen)._replace(last=seen.last)

    def period(self, pending: Episode | None, interval: int) -> Periodic | None:
        """The period, the skip under way among them."""
        if self.found or pending is None or not _is_lone(pending):
            return self.found
        return _period([*self.newest, _skip_of(pending)][-GAPS - 1 :], interval)


def _is_lone(episode: Episode) -> bool:
    return episode.attempts == 1 and not episode.nonfinite


def _skip_of(episode: Episode) -> _Skip:
    return _Skip(episode.first, episode.is_large)


def _period(skips: Sequence[_Skip], interval: int) -> Periodic | None:
    """Distances that are equal, and longer than a growth interval and the probe behind it."""
    for gaps in (GAPS, GAPS_OF_LARGE):
        row = list(skips)[-gaps - 1 :]
        apart = {b.at.attempt - a.at.attempt for a, b in pairwise(row)}
        are_large = all(skip.is_large for skip in row)
        longest_probe = interval + (AFTER_GROWTH_OF_LARGE if are_large else AFTER_GROWTH) - 1
        proves = gaps == GAPS or are_large
        if len(row) > gaps and len(apart) == 1 and proves and min(apart) > longest_probe:
            return Periodic(row[0].at, apart.pop(), len(row), row[-1].at)
    return None
