"""What the compactor looks at next: trouble first, else what has waited longest, and never much at once.

Taking batches in comes before showing them, so looking rests in proportion to what it costs. On a server that has all
it can do the rest of the news then waits; but what a person would want to hear of soon jumps the queue, and a look is
short, so that it need not wait for one of minutes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from .store.tail import Key

PAUSE_S: Final = 0.2  # between two looks at least: batches that arrive together are looked at together
REST: Final = 2.0  # × the CPU time of a look: rest before the next …
MOST_REST_S: Final = 10.0
URGENT_PAUSE_S, URGENT_REST = 0.05, 1.0  # … and before one at trouble
OVERDUE_S: Final = 3.0  # so long trouble may keep the rest from its turn
MOST_BATCHES: Final = 128  # of one look …
MOST_BYTES: Final = 8 << 20  # … and in all, but for a batch that is larger by itself


class New(NamedTuple):
    """A batch that was stored.

    Arguments:
        key: of it.
        size: of its body, bytes.
        is_urgent: as `limits.Extent` says.
    """

    key: Key
    size: int
    is_urgent: bool = False


class Look(NamedTuple):
    """What is to be looked at now: some of what is new of a run.

    Arguments:
        run.
        news: the batches; of each producer in sequence.
        at_all: look for what nobody has told of, too.
        is_followed: more of the run waits for a look already, and this one is not at trouble.
    """

    run: str
    news: list[New]
    at_all: bool = False
    is_followed: bool = False


@dataclass
class _Producer:
    since: float  # when the oldest of it came
    news: dict[Key, New] = field(default_factory=dict)
    is_urgent: bool = False


@dataclass
class _Run:
    producers: OrderedDict[int, _Producer] = field(default_factory=OrderedDict)
    at_all: bool = False

    def is_urgent(self) -> bool:
        return any(producer.is_urgent for producer in self.producers.values())

    def is_calm(self) -> bool:
        return self.at_all or not all(producer.is_urgent for producer in self.producers.values())


class Agenda:
    """What is new of each run. Any thread adds; one takes.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # in the order in which they are looked at
        self._urgent: set[str] = set()
        self._calm_at = self._urgent_at = -math.inf  # not before these moments
        self._in_work = math.inf  # since when the oldest of what was taken last has waited
        self._was_urgent = self._is_closed = False

    def add(self, news: Mapping[str, Iterable[New]]) -> None:
        """These batches of these runs are new."""
        now = self._clock()
        with self._changed:
            for run, batches in news.items():
                for batch in batches:
                    entry = self._runs.setdefault(run, _Run())
                    producer = entry.producers.setdefault(batch.key[0], _Producer(now))
                    producer.news[batch.key] = batch
                    producer.is_urgent |= batch.is_urgent
                    if batch.is_urgent:
                        self._urgent.add(run)
            self._changed.notify()

    def look_at_all(self, runs: Iterable[str]) -> None:
        """Of these runs there may be something that nobody has told of."""
        with self._changed:
            for run in runs:
                self._runs.setdefault(run, _Run()).at_all = True
            self._changed.notify()

    def take(self) -> Look | None:
        """What is to be looked at now, which is then no longer on the agenda; None while it is time to rest."""
        with self._changed:
            run, urgent = self._due()
            if run is None:
                return None
            entry = self._runs[run]
            taken = self._some_of(entry, urgent=urgent)
            look = Look(run, taken, entry.at_all and not urgent, bool(entry.producers) and not urgent)
            entry.at_all &= urgent
            if not entry.is_urgent():
                self._urgent.discard(run)
            if entry.producers or entry.at_all:
                self._runs.move_to_end(run)
            else:
                del self._runs[run]
            self._was_urgent = urgent
            return look

    def done(self, cpu_s: float) -> None:
        """The look that was taken has ended, and took so much CPU time."""
        now = self._clock()
        with self._changed:
            self._in_work = math.inf
            self._urgent_at = now + max(URGENT_PAUSE_S, min(URGENT_REST * cpu_s, MOST_REST_S))
            if not self._was_urgent:
                self._calm_at = now + max(PAUSE_S, min(REST * cpu_s, MOST_REST_S))

    def wait(self, most_s: float) -> None:
        """Wait until something is to be looked at, for so long at most."""
        with self._changed:
            if self._is_closed or self._due()[0] is not None:
                return
            now, times = self._clock(), (self._urgent_at, self._calm_at) if self._urgent else (self._calm_at,)
            ahead = [at - now for at in times if at > now] if self._runs else []
            self._changed.wait(min([most_s, *ahead]))

    def close(self) -> None:
        """Who waits shall wait no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def lag_s(self) -> float:
        """How long the oldest news has waited to be seen, s."""
        with self._changed:
            fronts = (next(iter(r.producers.values())).since for r in self._runs.values() if r.producers)
            oldest = min(self._in_work, min(fronts, default=math.inf))
        return 0.0 if oldest == math.inf else self._clock() - oldest

    def _due(self) -> tuple[str | None, bool]:
        """The run whose turn it is, if any, and whether it is for its trouble."""
        now = self._clock()
        calm = None
        if now >= self._calm_at:
            calm = next((run for run, entry in self._runs.items() if entry.is_calm()), None)
        is_overdue = calm is not None and now >= self._calm_at + OVERDUE_S
        if self._urgent and now >= self._urgent_at and not (is_overdue and self._was_urgent):
            return next(run for run in self._runs if run in self._urgent), True
        return calm, False

    def _some_of(self, entry: _Run, *, urgent: bool) -> list[New]:
        """As much as one look may hold, of each producer what came first."""
        taken: list[New] = []
        for name in [name for name, producer in entry.producers.items() if producer.is_urgent == urgent]:
            producer = entry.producers[name]
            some, rest = part(sorted(producer.news.values()), taken)
            if some:
                self._in_work = min(self._in_work, producer.since)
                taken += some
            if rest:
                producer.news = {new.key: new for new in rest}
                break
            del entry.producers[name]
        return taken


def part(news: Sequence[New], taken: Sequence[New] = ()) -> tuple[list[New], list[New]]:
    """As many of these as one look may hold beside what it holds already, and the rest."""
    left, count = MOST_BYTES - sum(new.size for new in taken), len(taken)
    for place, new in enumerate(news):
        left, count = left - new.size, count + 1
        if count > 1 and (left < 0 or count > MOST_BATCHES):  # one is taken however large
            return list(news[:place]), list(news[place:])
    return list(news), []
