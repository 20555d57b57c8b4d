"""Facts: what the attempts of one stream say, folded in order, at a cost that does not grow with the run.

    rows in order ──► Stream.fold ──► episodes   runs of attempts that were skipped or whose loss was not finite
                                      probes     ordinary skips at the ceiling, only counted
                                      recent     loss and norm of the last 64 attempts, older ones in a sketch
                                      diverged   a divergence, judged at each attempt of an episode
                                      path       of the scale; habits of the loop around it

A fold of rows in two parts gives the same facts as in one: everything kept is a sum, a bounded window of the
newest attempts, or fixed at the moment it happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from .episodes import Episode, Probes
from .habits import Habits
from .moments import NEVER, Moment, moment_of
from .periods import LoneSkips
from .rows import Rows, are_nonfinite, runs_of
from .scale_path import DEFAULT_INTERVAL, ScalePath
from .spikes import Spikes
from .trends import ESTABLISHED, Depth, Recent, Trend, ratio_of
from .zeros import Zeros

KEPT_EPISODES: Final = 128  # the first and the last of them, each
KEPT_RESETS: Final = 32  # likewise
AWAY: Final = 4.0  # a loss that has come so far from the first …
BACK: Final = 2.0  # … and is within this factor of the last ones has gone on


class Reset(NamedTuple):
    """An attempt at another scale than the one before it left.

    Arguments:
        goes_on: training does: by the steps that its optimizers count, or where they count none by the loss.
        is_counted: they count them.
    """

    at: Moment
    scale: float
    goes_on: bool
    is_counted: bool


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
    most_elements: int = 0  # that had a gradient in one attempt
    gaps: int = 0  # stretches of lost attempts before the newest
    taken: int = 0
    skips: int = 0
    scale: float = 0.0  # what the last attempt left
    lr: float = math.nan  # of the last step taken
    last: Moment = NEVER
    first_taken: Moment | None = None
    skips_at_first: int = 0  # before it
    first: Moment | None = None
    first_scale: float = 0.0
    first_loss: float = math.nan
    counted: float = math.nan  # steps that its optimizers' state counts
    resets: list[Reset] = field(default_factory=list)
    time_first: float = math.nan  # s, Unix time
    time_last: float = math.nan
    epoch: float = math.nan  # under way, and the attempt it began at
    epoch_start: int = -1
    overflow: tuple[int, float] = (0, math.inf)  # attempt and scale of the newest skip with a finite loss
    applied: Moment | None = None  # the first step that unscaling made inf or NaN
    applied_scale: float = 0.0
    zeros: Zeros = field(default_factory=Zeros)
    episodes: list[Episode] = field(default_factory=list)
    open: Episode | None = None
    probes: Probes = field(default_factory=Probes)
    lone_skips: LoneSkips = field(default_factory=LoneSkips)
    spikes: Spikes = field(default_factory=Spikes)
    diverged: Trend | None = None
    recent: Recent = field(default_factory=Recent)
    habits: Habits = field(default_factory=Habits)
    path: ScalePath = field(init=False)

    def __post_init__(self) -> None:
        self.path = ScalePath(self.interval)

    def fold(self, rows: Rows) -> None:
        """Take in further attempts of this stream, in order."""
        for start, stop in runs_of(rows["gaps"]):
            if self.gaps != rows["gaps"][start]:
                self._cut()
                self.gaps = int(rows["gaps"][start])
            self._fold_whole(rows[start:stop])

    def _fold_whole(self, rows: Rows) -> None:
        """Take in attempts between which none was lost."""
        if rows["idle"].any():
            rows = rows[~rows["idle"]]
        if not len(rows):
            return
        changed = np.flatnonzero(rows["scale"][1:] != rows["scale_after"][:-1]) + 1
        for part in np.split(rows, changed):
            self._fold_steady(part)

    def _fold_steady(self, rows: Rows) -> None:
        """Take in attempts each of which is at the scale that the one before it left."""
        self._begin_stream(rows)
        self._note_reset(rows)
        self.most_elements = max(self.most_elements, int(rows["numel"].max()))
        self.habits.fold(rows)
        if rows["applied"].any() and self.applied is None:
            first = rows[rows["applied"]][0]
            self.applied, self.applied_scale = moment_of(first), float(first["scale"])
        bad = rows["skipped"] | are_nonfinite(rows["loss"])
        for start, stop in runs_of(bad):
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

    def _cut(self) -> None:
        """Attempts were lost here: what comes now does not follow directly on what was before."""
        if self.open:
            self._keep(self.open)
            self.open = None
        self.lone_skips.newest.clear()
        self.habits.cut()
        self.spikes.cut()

    def _begin_stream(self, rows: Rows) -> None:
        if self.first is None:
            self.first, self.first_scale = moment_of(rows[0]), float(rows["scale"][0])
            self.first_loss, self.time_first = float(rows["loss"][0]), float(rows["time"][0])
        self.time_last = float(rows["time"][-1])

    def _note_reset(self, rows: Rows) -> None:
        row = rows[0]
        if self.last != NEVER and row["scale"] != self.scale:
            is_counted = not math.isnan(self.counted)
            self.resets.append(Reset(moment_of(row), float(row["scale"]), self._goes_on(row), is_counted))
            if len(self.resets) > 2 * KEPT_RESETS:
                del self.resets[KEPT_RESETS]
        self.counted = float(rows["counted"][-1])

    def _goes_on(self, row: Any) -> bool:
        if not math.isnan(self.counted):
            return bool(row["counted"] >= self.counted)
        loss = float(row["loss"])
        return ratio_of(self.first_loss, loss) > AWAY and ratio_of(loss, self.recent.loss()) < BACK

    def _note_epoch(self, rows: Rows) -> None:
        if np.isnan(rows["epoch"]).all():
            return
        for start, _ in runs_of(rows["epoch"]):
            epoch = float(rows["epoch"][start])
            if not math.isnan(epoch) and epoch != self.epoch:
                self.epoch, self.epoch_start = epoch, int(rows["attempt"][start])

    def _clean(self, rows: Rows) -> None:
        if self.open:
            self._close(moment_of(rows[0]))
        taken = np.flatnonzero(rows["taken"])
        if len(taken) and self.first_taken is None:
            self.first_taken, self.skips_at_first = moment_of(rows[taken[0]]), self.skips
        if len(taken):
            self.lr = float(rows["lr"][taken[-1]])
        self.attempts += len(rows)
        self.taken += len(taken)
        self._note_epoch(rows)
        self.path.fold(rows, self.recent.newest[:, 3])
        self.spikes.fold(rows, self.recent.newest[:, 2])
        self.zeros.fold(rows)
        self.recent.add(np.stack([rows["attempt"], rows["step"], rows["loss"], rows["norm"]], axis=1))
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
        self.zeros.learned = self.zeros.learned or bool(row["n_zero"] < row["numel"])
        self.path.growths_since_skip = 0
        finite = bool(np.isfinite(row["loss"]))
        if finite and row["skipped"]:
            self.overflow = moment.attempt, float(row["scale"])
        if finite:
            self.recent.add(np.array([[*moment, row["loss"], np.nan]]))
        news = finite or self.open.nonfinite == 1  # else loss and norm are those of the attempt before
        if self.diverged is None and news and (trend := self._trend(self.open, float(row["scale"]))):
            self.diverged = self.open.trend = trend._replace(seen=moment)
        self.last, self.scale = moment, float(row["scale_after"])

    def _trend(self, episode: Episode, scale: float) -> Trend | None:
        trend = self.recent.trend()
        depth, broke = Depth(scale, episode.high), episode.nonfinite > 0
        if trend is None and self.taken < ESTABLISHED:
            trend = self.recent.thrown(depth, broke=broke)
        if trend is None and self.attempts >= ESTABLISHED:
            trend = self.recent.leaps(depth, broke=broke)
        return trend

    def _begin(self, moment: Moment, scale: float, bad: int) -> Episode:
        if self.diverged and self.recent.settled(self.diverged):
            self.diverged = None
        since = moment.attempt - self.first_taken.attempt if self.first_taken else 0
        before = self.recent.finite_losses()[:, 2]
        return Episode(
            first=moment,
            scale=scale,
            high=self.path.highest_clean(moment.attempt),
            taken_before=self.taken,
            lr=self.lr,
            after_first_taken=since,
            after_growth=self.path.growths > 0,
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
        self.lone_skips.add(episode, self.interval)
        self._keep(episode)

    def _keep(self, episode: Episode) -> None:
        ordinary = episode.probes and not (episode.calibrates or episode.is_large)
        if ordinary and self.probes.room_for(episode, self.interval):
            self.probes.add(episode)
        else:
            self.episodes.append(episode)
            if len(self.episodes) > 2 * KEPT_EPISODES:
                del self.episodes[KEPT_EPISODES]
