"""Facts: what the attempts of one stream say, folded in order, at a cost that does not grow with the run.

    rows in order ──► Stream.fold ──► episodes   runs of attempts that were skipped or whose loss was not finite
                                      probes     ordinary skips at the ceiling, only counted
                                      recent     loss and norm of the last 64 attempts, older ones in a sketch
                                      trend      a divergence, judged at each attempt of an episode

A fold of rows in two parts gives the same facts as in one: everything kept is a sum, a bounded window of the
newest attempts, or fixed at the moment it happened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.records import is_missing

from .habits import Habits
from .moments import NEVER, Moment, moment_of
from .rows import Rows
from .sketch import Sketch

RECENT: Final = 64  # attempts whose loss and norm are kept one by one
KEPT_EPISODES: Final = 128  # the first and the last of them, each
CALIBRATION_ATTEMPTS: Final = (
    30  # after the first step taken, in which a few more skips belong to calibration
)
CALIBRATION_RUN: Final = 4
PROBE_RUN: Final = 2  # × hysteresis, which is 1 for torch's policy
PROBE_DEPTH: Final = 4  # the scale of a probe is at least a quarter of the highest clean one
PROBES_PER_INTERVAL: Final = 2
PROBE_INTERVALS: Final = 5
PERIODS: Final = 4  # equal gaps between single skips
AFTER_GROWTH: Final = 3  # attempts by which a period is longer than the growth interval; a probe comes sooner
PAST: Final = 4.0  # × the own 99th percentile
LEAPS: Final = 3  # changes of the weights in a row, each of which …
LEAP: Final = 2.0  # … makes the loss so many times larger
ESTABLISHED: Final = 24  # attempts by which a stream has percentiles of its own to leap from
HALF: Final = (0.4, 0.62)  # of the norm before
DEFAULT_INTERVAL: Final = 2000


class Trend(NamedTuple):
    """Loss and true norm that grew past 4 × their own 99th percentile: since when, from what, to what."""

    onset: Moment
    seen: Moment
    loss: float
    loss_p99: float
    norm: float
    norm_p99: float


@dataclass(slots=True)
class Episode:
    """Consecutive attempts of one stream that were skipped or whose loss was not finite.

    `high` is the highest clean scale of the two growth intervals before it, 0 where there was none.
    `loss_before` is the median loss of the attempts before. `closed` is the first clean attempt after it.
    """

    first: Moment
    scale: float
    high: float
    taken_before: int
    after_first_taken: int
    after_growth: bool
    descended: bool  # attempts were skipped before the first step was taken
    loss_before: float
    trend: Trend | None
    hysteresis: int = 1
    last: Moment = NEVER
    scale_last: float = -1.0  # at the last of them
    scale_after: float = 0.0
    attempts: int = 0
    skips: int = 0
    nonfinite: int = 0
    innocent: int = 0  # of these, those of a gradient penalty: the scale itself may have made them
    unskipped: int = 0  # of these, those whose step was not skipped
    first_nonfinite: Moment | None = None
    last_finite: Moment | None = None  # the last attempt before it, if it was skipped with a finite loss
    loss_last: float = 0.0
    batch: float = math.nan  # of the first loss that was not finite, if it was logged
    epoch: float = math.nan
    position: int = -1  # its place in the epoch, in attempts; -1 where no epoch was logged
    starved: int = 0  # bits of optimizers that were skipped in the last `beside` attempts …
    stepping: int = 0  # … and of those that stepped in them
    beside: int = 0
    at_one: int = (
        0  # attempts at a scale that no halving brings to where a step is taken: 1 and below, inf, NaN
    )
    first_at_one: Moment | None = None
    held: int = 0  # skips in a row, up to the last, that left the scale as it was
    first_held: Moment | None = None
    first_bad_elements: int = 0
    closed: Moment | None = None

    def add(self, row: Any) -> None:
        """Take the next attempt in."""
        moment = moment_of(row)
        self._note_floor(moment, float(row["scale"]))
        self.last, self.scale_after, self.loss_last = moment, float(row["scale_after"]), float(row["loss"])
        self.attempts += 1
        self.skips += bool(row["skipped"])
        self._note_optimizers(int(row["skips"]), int(row["stepped"]) & ~int(row["skips"]))
        if _is_nonfinite(row["loss"]):
            self.nonfinite += 1
            self.innocent += bool(row["penalised"])
            self.unskipped += not row["skipped"]
            if self.first_nonfinite is None:
                self.first_nonfinite = moment
                self.batch, self.epoch = float(row["batch"]), float(row["epoch"])
        elif self.first_nonfinite is None and row["skipped"]:
            self.last_finite = moment
        if not is_descending(row["scale"]):
            self.at_one += 1
            self.first_at_one = self.first_at_one or moment

    def _note_optimizers(self, starved: int, stepping: int) -> None:
        """Count the attempts in which the same optimizers were skipped while the same others stepped."""
        if not (self.starved & starved and self.stepping & stepping):
            self.starved, self.stepping, self.beside = starved, stepping, 0
        self.starved, self.stepping = self.starved & starved, self.stepping & stepping
        self.beside += 1

    def _note_floor(self, moment: Moment, scale: float) -> None:
        """Count the skips at one scale, whoever keeps it there: the policy, or a loop that sets a minimum."""
        if scale != self.scale_last or self.first_held is None:
            self.held, self.first_held, self.scale_last = 0, moment, scale
        self.held += 1

    @property
    def calibrates(self) -> bool:
        """A loss that is no fault of the forward pass, and no step taken yet or only just."""
        if self.nonfinite > self.innocent or self.trend or (self.innocent and self.at_one):
            return False
        just_begun = (
            self.after_first_taken <= CALIBRATION_ATTEMPTS and self.descended and not self.after_growth
        )
        return self.taken_before == 0 or (just_begun and self.attempts <= CALIBRATION_RUN * self.hysteresis)

    @property
    def probes(self) -> bool:
        """Such a loss, a short run, and a scale near the highest clean one: the ordinary skip."""
        near = math.inf > self.scale >= self.high / PROBE_DEPTH > 0
        ordinary = self.nonfinite == self.innocent and not self.trend
        return ordinary and self.attempts <= PROBE_RUN * self.hysteresis and near


class Periodic(NamedTuple):
    """Single skipped attempts with a finite loss, at equal distances: the first, and the distance."""

    first: Moment
    attempts: int


@dataclass(slots=True)
class Probes:
    """Ordinary skips at the ceiling, counted."""

    episodes: int = 0
    skips: int = 0
    first: Moment | None = None
    last: Moment | None = None
    starts: deque[int] = field(default_factory=lambda: deque(maxlen=PROBES_PER_INTERVAL * PROBE_INTERVALS))

    def room_for(self, episode: Episode, interval: int) -> bool:
        """Whether another skip at this moment still keeps within 2 an interval, averaged over 5."""
        full = len(self.starts) == self.starts.maxlen
        return not full or episode.first.attempt - self.starts[0] > PROBE_INTERVALS * interval

    def add(self, episode: Episode) -> None:
        """Count an episode."""
        self.episodes += 1
        self.skips += episode.skips
        self.first = self.first or episode.first
        self.last = episode.last
        self.starts.append(episode.first.attempt)


@dataclass(slots=True)
class Stream:
    """The facts of one stream.

    Arguments:
        interval: the scaler's growth interval, in attempts.
        hysteresis: overflows from one backoff to the next; 1 for torch's policy.
    """

    interval: int = DEFAULT_INTERVAL
    hysteresis: int = 1
    attempts: int = 0
    taken: int = 0
    skips: int = 0
    growths: int = 0
    growths_since_skip: int = 0
    scale: float = 0.0  # what the last attempt left
    last: Moment = NEVER
    first_taken: Moment | None = None
    skips_at_first: int = 0  # before it
    first_growth: Moment | None = None
    halved: int = 0  # growths whose norm is half of those before …
    whole: int = 0  # … and those whose norm is not
    first_halved: Moment | None = None
    first: Moment | None = None
    first_scale: float = 0.0
    first_loss: float = math.nan
    time_first: float = math.nan  # s, Unix time
    time_last: float = math.nan
    epoch: float = math.nan  # under way, and the attempt it began at
    epoch_start: int = -1
    lone_skips: deque[Moment] = field(default_factory=lambda: deque(maxlen=PERIODS + 1))
    periodic: Periodic | None = None
    overflow: tuple[int, float] = (0, math.inf)  # attempt and scale of the newest skip with a finite loss
    below_one: int = 0  # steps taken at a scale below 1, since it last stood at 1 or above
    below_since: Moment | None = None
    loss_below: float = math.nan  # the first loss there
    applied: Moment | None = None  # the first step that unscaling made inf or NaN
    applied_scale: float = 0.0
    zero_since: Moment | None = None  # every gradient zero although the loss is not
    zero_attempts: int = 0
    episodes: list[Episode] = field(default_factory=list)
    open: Episode | None = None
    probes: Probes = field(default_factory=Probes)
    diverged: Trend | None = None
    recent: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 4)))
    losses: Sketch = field(default_factory=Sketch)
    norms: Sketch = field(default_factory=Sketch)
    habits: Habits = field(default_factory=Habits)
    clean_scales: deque[tuple[float, int]] = field(default_factory=deque)  # scale, last attempt at it

    def fold(self, rows: Rows) -> None:
        """Take in further attempts of this stream, in order."""
        rows = rows[~rows["idle"]]
        if not len(rows):
            return
        self._begin_stream(rows)
        self.habits.fold(rows)
        if rows["applied"].any() and self.applied is None:
            first = rows[rows["applied"]][0]
            self.applied, self.applied_scale = moment_of(first), float(first["scale"])
        bad = rows["skipped"] | _nonfinite(rows["loss"])
        for start, stop in _runs(bad):
            if bad[start]:
                for row in rows[start:stop]:
                    self._trouble(row)
            else:
                self._clean(rows[start:stop])

    def all_episodes(self) -> list[Episode]:
        """The episodes that are not ordinary probes, the open one last."""
        return [*self.episodes, self.open] if self.open else self.episodes

    def ceiling(self) -> float:
        """The scale of the newest skip with a finite loss in the last 2 growth intervals; inf without one."""
        at, scale = self.overflow
        return scale if self.last.attempt - at <= 2 * self.interval else math.inf

    def recent_loss(self) -> float:
        """Median of the newest finite losses; NaN without any."""
        losses = _finite(self.recent, 2)[-8:, 2]
        return median(losses.tolist()) if len(losses) else math.nan

    def baseline(self) -> tuple[float, float]:
        """99th percentiles of loss and norm, the newest attempts left out so that a trend is not its own past."""
        before = self.recent[: max(len(self.recent) // 2, 1)]
        return self.losses.percentile(99, before[:, 2]), self.norms.percentile(99, before[:, 3])

    def trend(self) -> Trend | None:
        """A divergence under way: both have risen through all thirds of the last 24, and past 4 × the percentile."""
        loss, norm = (_risen(_finite(self.recent, column)[-24:, column]) for column in (2, 3))
        if not (loss and norm):  # mostly so, and percentiles cost more
            return None
        return _trend_of(self.recent, loss, norm, *self.baseline())

    def leaps(self, scale: float) -> Trend | None:
        """A divergence in a few steps, judged at a skip: each of the last 3 has at least doubled the loss.

        Attempts are taken together by step, as the weights stay what they are while attempts are skipped: one wild
        batch leaps once and is not there in the next. A skip at less than a quarter of the highest clean scale tells
        that gradients have passed 4 × what they were, whatever the last norm that could be taken was.
        """
        loss = _leapt(_finite(self.recent, 2)) if self.attempts >= ESTABLISHED else 0.0
        norms = _finite(self.recent, 3)[:, 3]
        if not loss or not len(norms):
            return None
        fell = self.open is not None and scale < self.open.high / PROBE_DEPTH
        return _trend_of(
            self.recent, loss, float(norms[-1]), *self.baseline(), norm_past=1.0 if fell else PAST
        )

    def settled(self, trend: Trend) -> bool:
        """Whether the loss has come back from a divergence: the last 8 stand below 2 × the percentile before it."""
        losses = _finite(self.recent, 2)[-8:]
        later = bool(len(losses)) and losses[0, 0] > trend.seen.attempt
        return later and bool(np.all(losses[:, 2] < 2 * trend.loss_p99))

    def _begin_stream(self, rows: Rows) -> None:
        if self.first is None:
            self.first, self.first_scale = moment_of(rows[0]), float(rows["scale"][0])
            self.first_loss, self.time_first = float(rows["loss"][0]), float(rows["time"][0])
        self.time_last = float(rows["time"][-1])

    def _note_epoch(self, rows: Rows) -> None:
        if np.isnan(rows["epoch"]).all():
            return
        for start, _ in _runs(rows["epoch"]):
            epoch = float(rows["epoch"][start])
            if not math.isnan(epoch) and epoch != self.epoch:
                self.epoch, self.epoch_start = epoch, int(rows["attempt"][start])

    def _clean(self, rows: Rows) -> None:
        if self.open:
            self._close(moment_of(rows[0]))
        taken = np.flatnonzero(rows["taken"])
        if len(taken) and self.first_taken is None:
            self.first_taken, self.skips_at_first = moment_of(rows[taken[0]]), self.skips
        self.attempts += len(rows)
        self.taken += len(taken)
        self._note_epoch(rows)
        self._note_below_one(rows)
        self._note_scales(rows)
        self._note_zeros(rows)
        self._remember(np.stack([rows["attempt"], rows["step"], rows["loss"], rows["norm"]], axis=1))
        self.last, self.scale = moment_of(rows[-1]), float(rows["scale_after"][-1])

    def _trouble(self, row: Any) -> None:
        moment = moment_of(row)
        self._note_epoch(np.array([row]))
        if self.open is None:
            self.open = self._begin(moment, float(row["scale"]), int(row["n_bad"]))
        self.open.add(row)
        if self.open.first_nonfinite == moment and self.epoch_start >= 0:
            self.open.position = moment.attempt - self.epoch_start
        self.attempts += 1
        self.skips += bool(row["skipped"])
        self.growths_since_skip = 0
        finite = bool(np.isfinite(row["loss"]))
        if finite and row["skipped"]:
            self.overflow = moment.attempt, float(row["scale"])
        if finite:
            self._remember(np.array([[*moment, row["loss"], np.nan]]))
        news = finite or self.open.attempts == 1  # else loss and norm are those of the attempt before
        if self.diverged is None and news and (trend := self.trend() or self.leaps(float(row["scale"]))):
            self.diverged = self.open.trend = trend._replace(seen=moment)
        self.last, self.scale = moment, float(row["scale_after"])

    def _begin(self, moment: Moment, scale: float, bad: int) -> Episode:
        if self.diverged and self.settled(self.diverged):
            self.diverged = None
        since = moment.attempt - self.first_taken.attempt if self.first_taken else 0
        before = _finite(self.recent, 2)[:, 2]
        return Episode(
            first=moment,
            scale=scale,
            high=self._highest_clean_scale(moment.attempt),
            taken_before=self.taken,
            after_first_taken=since,
            after_growth=self.growths > 0,
            descended=self.skips_at_first > 0,
            loss_before=median(before.tolist()) if before.size else float("nan"),
            trend=self.diverged,
            hysteresis=self.hysteresis,
            first_bad_elements=bad,
        )

    def _close(self, moment: Moment) -> None:
        episode, self.open = self.open, None
        assert episode is not None
        episode.closed = moment
        if episode.attempts == 1 and not episode.nonfinite:
            self.lone_skips.append(episode.first)
            self.periodic = self.periodic or self._period()
        ordinary = episode.probes and not episode.calibrates
        if ordinary and self.probes.room_for(episode, self.interval):
            self.probes.add(episode)
        else:
            self.episodes.append(episode)
            if len(self.episodes) > 2 * KEPT_EPISODES:
                del self.episodes[KEPT_EPISODES]

    def _period(self) -> Periodic | None:
        """Single skips at equal distances that are longer than a growth interval and the probe behind it."""
        gaps = {b.attempt - a.attempt for a, b in pairwise(self.lone_skips)}
        if len(self.lone_skips) <= PERIODS or len(gaps) != 1:
            return None
        attempts = gaps.pop()
        return Periodic(self.lone_skips[0], attempts) if attempts >= self.interval + AFTER_GROWTH else None

    def _note_scales(self, rows: Rows) -> None:
        grew = np.flatnonzero(rows["scale_after"] > rows["scale"])
        self.growths += len(grew)
        self.growths_since_skip += len(grew)
        if len(grew):
            self._note_halvings(rows, grew)
            self.first_growth = self.first_growth or moment_of(rows[grew[0]])
        for start, stop in _runs(rows["scale"]):
            scale, last = float(rows["scale"][start]), int(rows["attempt"][stop - 1])
            if self.clean_scales and self.clean_scales[-1][0] == scale:
                self.clean_scales.pop()
            self.clean_scales.append((scale, last))
        self._forget_scales(int(rows["attempt"][-1]))

    def _note_halvings(self, rows: Rows, grew: npt.NDArray[np.int64]) -> None:
        """Whether the gradients of growths were divided by the grown scale."""
        norms = np.concatenate([self.recent[:, 3], rows["norm"]])
        for i in grew.tolist():
            before = norms[: len(self.recent) + i]
            usual = before[np.isfinite(before)][-8:]
            if len(usual) and rows["norm"][i] > 0:
                halved = HALF[0] < rows["norm"][i] / median(usual.tolist()) < HALF[1]
                self.halved, self.whole = self.halved + halved, self.whole + (not halved)
                if halved:
                    self.first_halved = self.first_halved or moment_of(rows[i])

    def _forget_scales(self, now: int) -> None:
        while self.clean_scales and self.clean_scales[0][1] < now - 2 * self.interval:
            self.clean_scales.popleft()

    def _highest_clean_scale(self, now: int) -> float:
        self._forget_scales(now)
        return max((scale for scale, _ in self.clean_scales), default=0.0)

    def _note_below_one(self, rows: Rows) -> None:
        above = np.flatnonzero(rows["scale"] >= 1)
        if len(above):
            self.below_one, self.below_since, self.loss_below = 0, None, math.nan
            rows = rows[above[-1] + 1 :]
        if not len(rows):
            return
        if self.below_since is None:
            self.below_since, self.loss_below = moment_of(rows[0]), float(rows["loss"][0])
        self.below_one += int(rows["taken"].sum())

    def _note_zeros(self, rows: Rows) -> None:
        zero = (rows["numel"] > 0) & (rows["n_zero"] == rows["numel"]) & (rows["loss"] != 0)
        other = np.flatnonzero(~zero)
        if len(other):
            self.zero_since, self.zero_attempts = None, 0
            rows = rows[other[-1] + 1 :]
        if len(rows):
            self.zero_since = self.zero_since or moment_of(rows[0])
            self.zero_attempts += len(rows)

    def _remember(self, seen: npt.NDArray[np.float64]) -> None:
        known = np.concatenate([self.recent, seen])
        old, self.recent = known[:-RECENT], known[-RECENT:]
        if len(old):
            self.losses.add(old[:, 2])
            self.norms.add(old[:, 3])


def _trend_of(
    recent: npt.NDArray[np.float64],
    loss: float,
    norm: float,
    loss_p99: float,
    norm_p99: float,
    norm_past: float = PAST,
) -> Trend | None:
    """Loss and norm that have risen past 4 × their 99th percentile; onset is when the loss last passed it."""
    if not (loss > PAST * loss_p99 > 0 and norm > norm_past * norm_p99 > 0):
        return None
    losses = _finite(recent, 2)
    below = np.flatnonzero(losses[:, 2] <= loss_p99)
    onset = losses[min(below[-1] + 1, len(losses) - 1) if len(below) else 0]
    moment = Moment(int(onset[0]), int(onset[1]))
    return Trend(moment, moment, loss, loss_p99, norm, norm_p99)


def _risen(values: npt.NDArray[np.float64]) -> float:
    """The median of the last third if each third stands 1.25 × above the one before, else 0.

    A spike that falls again does not rise through all thirds, and a jump to a new level does not either.
    """
    count = len(values)
    if count < 3:
        return 0.0
    listed, cut = values.tolist(), count // 3
    first, second, third = (
        median(listed[:cut]),
        median(listed[cut : count - cut]),
        median(listed[count - cut :]),
    )
    return third if third > 1.25 * second > 1.25 * 1.25 * first > 0 else 0.0


def _leapt(recent: npt.NDArray[np.float64]) -> float:
    """The median loss of the newest step if it and those of the steps before leapt one after another, else 0."""
    medians = [float(np.median(recent[a:b, 2])) for a, b in list(_runs(recent[:, 1]))[-LEAPS - 1 :]]
    leapt = all(after >= LEAP * before > 0 for before, after in pairwise(medians))
    return medians[-1] if leapt and len(medians) > LEAPS else 0.0


def _finite(recent: npt.NDArray[np.float64], column: int) -> npt.NDArray[np.float64]:
    return recent[np.isfinite(recent[:, column])]


def _runs(values: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of equal values."""
    if len(values) == 0:
        return
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    yield from zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True)


def _nonfinite(losses: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    bad: npt.NDArray[np.bool_] = ~np.isfinite(losses)
    if bad.any():
        bad &= ~is_missing(losses)
    return bad


def is_descending(scale: float) -> bool:
    """Whether a scale is one from which halvings lead to where a step is taken: above 1, and finite."""
    return bool(1 < scale < math.inf)


def _is_nonfinite(loss: float) -> bool:
    return not np.isfinite(loss) and not bool(is_missing(loss))
