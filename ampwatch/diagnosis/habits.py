"""Habits of a training loop that show in its rows: what is pinned, left over, or cleaned, attempt after attempt.

Each is a small state, folded in order; a fold in two parts gives the same as in one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.records import is_missing
from ampwatch.stats.layout import FLOAT16_MAX

from .jumps import Jump
from .moments import Moment, moment_of
from .rows import Rows
from .tied import Tied

PINNED: Final = 1e-5  # relative: what a clip in float32 leaves
PINNED_RUN: Final = 5
MOVES: Final = 1e-3  # relative spread of the loss
ROUND_DIGITS: Final = 2
SETTLING: Final = 100  # attempts
EVEN: Final = 0.25  # root mean square over the largest
LEAST_SAME: Final = 2  # windows of one length that another is compared with
WINDOWS: Final = 3  # of another length than usual
ENOUGH: Final = 6  # … and from as many on chance is small
RECENT: Final = 8  # windows before one, of which some are of another length
MOST: Final = 16  # that are looked at together
SUM_LEAST, SUM_LEAST_OF_FEW, SUM_HIGH = (
    0.4,
    0.6,
    1.4,
)  # powers that a sum shows, and no mean; noise alone makes 0.5
LEAST_ERROR: Final = 0.05
FIVES: Final = 5.0**4
LARGEST: Final = 3.4028234663852886e38  # of float32: what nan_to_num makes of inf


class _Range(NamedTuple):
    """From the smallest to the largest of finite values."""

    low: float
    high: float

    def over(self, value: float) -> _Range:
        return _Range(min(self.low, value), max(self.high, value)) if math.isfinite(value) else self

    @property
    def spread(self) -> float:
        """Relative to the larger end."""
        return (
            (self.high - self.low) / max(abs(self.low), abs(self.high), 1e-300)
            if self.low <= self.high
            else 0.0
        )


NOTHING: Final = _Range(np.inf, -np.inf)


class Pinned(NamedTuple):
    """A value that stayed the same, and since when."""

    value: float
    since: Moment


@dataclass(slots=True)
class Pin:
    """A value of taken attempts that stays the same while the loss or the scale does not."""

    value: float = 0.0  # the last
    since: Moment | None = None
    count: int = 0
    values: _Range = field(default_factory=lambda: NOTHING)
    losses: _Range = field(default_factory=lambda: NOTHING)
    scales: _Range = field(default_factory=lambda: NOTHING)
    found: Pinned | None = None  # the first run that proves it

    def fold(self, rows: Rows, values: npt.NDArray[np.float64]) -> None:
        """Take in taken attempts and the value of each."""
        if self.found is not None:
            return
        near = np.abs(np.diff(values, prepend=self.value)) <= PINNED * np.abs(values)
        self.value = float(values[-1])
        inner = near | np.append(near[1:], True)  # of a run, or the last, which may begin one
        for i in np.flatnonzero(inner).tolist():
            self._add(rows[i], float(values[i]), anew=not near[i])

    def _add(self, row: Any, value: float, *, anew: bool) -> None:
        values = self.values.over(value)
        if anew or self.since is None or values.spread > 2 * PINNED:
            self.since, self.count = moment_of(row), 0
            values, self.losses, self.scales = NOTHING.over(value), NOTHING, NOTHING
        self.count += 1
        self.values = values
        self.losses = self.losses.over(float(row["loss"]))
        self.scales = self.scales.over(float(row["scale"]))
        if self.found is None and self.count >= PINNED_RUN and self._proves:
            self.found = Pinned(self.values.low, self.since)

    @property
    def _proves(self) -> bool:
        """A round number while the loss moves, or any number through a change of the scale."""
        if self.values.low > self.values.high or self.values.low <= 0:
            return False
        moves = self.losses.spread > MOVES and self.scales.low > 1 and _is_round(self.values.low)
        return moves or self.scales.high > self.scales.low


@dataclass(slots=True)
class Seen:
    """Attempts of a kind: how many, the first and the last, and how many of them in a row up to now, since when."""

    count: int = 0
    run: int = 0
    since: Moment | None = None
    longest: int = 0
    first: Moment | None = None
    last: Moment | None = None

    def fold(self, rows: Rows, is_seen: npt.NDArray[np.bool_]) -> None:
        """Take in attempts and whether each is of the kind."""
        if not is_seen.any():
            self.run = 0
            return
        for row, seen in zip(rows, is_seen, strict=True):
            self.run = self.run + 1 if seen else 0
            if seen:
                self.count += 1
                self.since = moment_of(row) if self.run == 1 else self.since
                self.longest = max(self.longest, self.run)
                self.first = self.first or moment_of(row)
                self.last = moment_of(row)


@dataclass(slots=True)
class Schedule:
    """How the learning rate goes on: attempts after which it changed, and those of them that were skipped."""

    attempts: int = 0
    taken: int = 0
    changes: int = 0
    early: int = 0  # changes after skips before the first step taken
    settling: int = 0  # in the 100 attempts after it, where a few more skips belong to calibration
    late: int = 0  # later
    first: Moment | None = None
    first_change: int = -1  # by the number of the attempt, as the next
    last_change: int = -1
    at_start: float = np.nan
    at_first_step: float = np.nan
    highest_before: float = -np.inf  # of the attempts before the first step
    highest_after: float = -np.inf  # of the steps taken
    first_taken: int = -1
    last: tuple[int, float, bool] | None = None  # attempt, learning rate and skip of the attempt before

    @property
    def ahead(self) -> int:
        """Steps of the schedule without one of the optimizer."""
        return self.early + self.settling + self.late

    @property
    def change_share(self) -> float:
        """Of the attempts from the first change to the last, that after which the learning rate changed."""
        return self.changes / (self.last_change - self.first_change + 1) if self.changes else 0.0

    def fold(self, rows: Rows) -> None:
        """Take in attempts."""
        rows = rows[np.isfinite(rows["lr"])]
        if not len(rows):
            return
        if self.last is None:
            self.at_start = float(rows["lr"][0])
            self.last = (int(rows["attempt"][0]), self.at_start, False)
        _, lr, skipped = self.last
        changed = rows["lr"] != np.append(lr, rows["lr"][:-1])
        after_skip = changed & np.append(skipped, rows["skipped"][:-1])
        self._note_changes(np.flatnonzero(changed) + self.attempts)
        self.attempts += len(rows)
        self._note_taken(rows)
        for row in rows[after_skip]:
            self._count(row)
        self.last = (int(rows["attempt"][-1]), float(rows["lr"][-1]), bool(rows["skipped"][-1]))

    def _note_changes(self, numbers: npt.NDArray[np.int64]) -> None:
        if len(numbers):
            self.first_change = int(numbers[0]) if self.first_change < 0 else self.first_change
            self.last_change = int(numbers[-1])
            self.changes += len(numbers)

    def _note_taken(self, rows: Rows) -> None:
        taken = rows[rows["taken"]]
        if self.first_taken < 0:
            before = rows[: int(np.argmax(rows["taken"])) if len(taken) else len(rows)]
            self.highest_before = max(self.highest_before, float(before["lr"].max(initial=-np.inf)))
        if not len(taken):
            return
        if self.first_taken < 0:
            self.first_taken, self.at_first_step = int(taken["attempt"][0]), float(taken["lr"][0])
        self.taken += len(taken)
        self.highest_after = max(self.highest_after, float(taken["lr"].max()))

    def _count(self, row: Any) -> None:
        self.first = self.first or moment_of(row)
        since = int(row["attempt"]) - self.first_taken
        if self.first_taken < 0 or since <= 0:
            self.early += 1
        elif since <= SETTLING:
            self.settling += 1
        else:
            self.late += 1


class Comparison(NamedTuple):
    """A window against others of another length, as logarithms: of the ratio of lengths, and of the ratio of norms."""

    length: float
    norm: float


class Power(NamedTuple):
    """Of the length of a window, with which its norm goes; at least and at most, by 2.5 standard errors."""

    value: float
    least: float
    most: float
    windows: int

    @classmethod
    def of(cls, compared: Collection[Comparison]) -> Power:
        """By least squares through the origin."""
        weight = sum(length * length for length, _ in compared)
        value = sum(length * norm for length, norm in compared) / weight
        spread = sum((norm - value * length) ** 2 for length, norm in compared) / (len(compared) - 1)
        error = 2.5 * max(math.sqrt(spread / weight), LEAST_ERROR)
        return cls(value, value - error, value + error, len(compared))

    @property
    def is_of_a_sum(self) -> bool:
        """Whether no mean shows it."""
        return self.value <= SUM_HIGH and self.least >= (
            SUM_LEAST if self.windows >= ENOUGH else SUM_LEAST_OF_FEW
        )


@dataclass(slots=True)
class Windows:
    """How the norm goes with the number of micro-batches, where accumulation windows differ in length.

    Each window is compared with those of the 8 before it that have the commonest other length: a norm that grows as
    n^1 is that of a sum, n^0 that of a mean; noise alone makes n^0.5 of the one and n^-0.5 of the other. As training goes
    on there is ever more noise: what was proven stays so until later windows show a mean.
    """

    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    compared: deque[Comparison] = field(default_factory=lambda: deque(maxlen=MOST))
    proven: Power | None = None  # the surest that a sum has shown
    first: Moment | None = None

    def fold(self, taken: Rows) -> None:
        """Take in taken attempts."""
        rows = taken[(taken["micro_batches"] >= 1) & (taken["norm"] > 0)]
        counts = {*rows["micro_batches"].tolist(), *(count for count, _ in self.recent)}
        if len(counts) == 1:  # nothing to compare, as mostly
            rows = rows[-RECENT:]
        for row in rows:
            self._add(row, int(row["micro_batches"]), float(row["norm"]))

    def _add(self, row: Any, count: int, norm: float) -> None:
        others = Counter(n for n, _ in self.recent if n != count).most_common(1)
        if others and others[0][1] >= LEAST_SAME and not self._is_common(count):
            usual = others[0][0]
            same = median(x for n, x in self.recent if n == usual)
            self.compared.append(Comparison(math.log(count / usual), math.log(norm / same)))
            self.first = self.first or moment_of(row)
            if len(self.compared) == MOST:
                self._prove(Power.of(self.compared))
        self.recent.append((count, norm))

    def of_a_sum(self) -> Power | None:
        """The power that shows a sum, if one does."""
        if len(self.compared) < WINDOWS:
            return None
        now = Power.of(self.compared)
        return now if now.is_of_a_sum else self.proven

    def _prove(self, now: Power) -> None:
        if now.most < SUM_LEAST:
            self.proven = None
        elif now.is_of_a_sum and (self.proven is None or now.least > self.proven.least):
            self.proven = now

    def _is_common(self, count: int) -> bool:
        """Whether most windows have this length: then they are what others are compared with."""
        return sum(n == count for n, _ in self.recent) > len(self.recent) / 2


@dataclass(slots=True)
class Habits:
    """What the rows of one stream show of the loop around it."""

    norm: Pin = field(default_factory=Pin)  # the norm of the scaled gradient
    largest: Pin = field(default_factory=Pin)  # its largest element
    cleaned: Seen = field(default_factory=Seen)  # every gradient finite, the loss NaN
    unhurt: Seen = field(
        default_factory=Seen
    )  # every gradient finite, the loss infinite: a sum may have overflowed
    saturated: Seen = field(default_factory=Seen)  # the largest element is the largest number of float32 …
    at_limit: Seen = field(default_factory=Seen)  # … or of float16
    replaced: Seen = field(default_factory=Seen)  # … or a round one that no float16 holds
    infinite: Seen = field(default_factory=Seen)  # a gradient is inf or NaN
    unscaled: Seen = field(default_factory=Seen)  # stepped, and no scale() was seen
    residue: Seen = field(default_factory=Seen)  # a gradient was left over as backward began
    divided: Seen = field(default_factory=Seen)  # … of an attempt that was unscaled and not stepped
    overflown_norms: Seen = field(default_factory=Seen)  # the user's norm is inf, every gradient finite
    windows: Windows = field(default_factory=Windows)
    still: Seen = field(default_factory=Seen)  # stepped at a learning rate of 0
    schedule: Schedule = field(default_factory=Schedule)
    jump: Jump = field(default_factory=Jump)
    tied: Tied = field(default_factory=Tied)
    skipped_last: bool = False
    unstepped_last: bool = False

    def fold(self, rows: Rows) -> None:
        """Take in further attempts, in order."""
        if not len(rows):
            return
        loud = np.flatnonzero(~_are_quiet(rows))
        start, stop = (loud[0], loud[-1] + 1) if len(loud) else (0, 0)
        if start:
            self._pass_over()
        if stop:
            self._note(rows[start:stop])
        if stop < len(rows):  # as most are
            self._pass_over()
        self.schedule.fold(rows)
        taken = rows[rows["taken"]]
        if len(taken):
            self.still.fold(taken, taken["still"])
            self.windows.fold(taken)
            self.jump.fold(taken)
            self.norm.fold(taken, taken["norm"] * taken["scale"])
            self.largest.fold(taken, np.where(_is_even(taken), taken["max_abs"], np.nan))

    def _note(self, rows: Rows) -> None:
        self.tied.fold(rows)
        finite = ~rows["skipped"] & (rows["n_bad"] == 0) & (rows["numel"] > 0)
        broken = ~np.isfinite(rows["loss"]) & ~is_missing(rows["loss"])
        kept = finite & broken & ~rows["penalised"]
        self.cleaned.fold(rows, kept & np.isnan(rows["loss"]))
        self.unhurt.fold(rows, kept & np.isinf(rows["loss"]))
        self.saturated.fold(rows, finite & (rows["max_abs"] == LARGEST))
        self.at_limit.fold(rows, finite & (rows["max_abs"] == FLOAT16_MAX))
        self.replaced.fold(rows, finite & _is_put_there(rows["max_abs"], rows["scale"]))
        self.infinite.fold(rows, rows["n_bad"] > 0)
        self.unscaled.fold(rows, rows["unscaled"])
        unapplied = np.append(self.unstepped_last, rows["unstepped"][:-1])
        self.unstepped_last = bool(rows["unstepped"][-1])
        self.residue.fold(rows, rows["residue"] & ~unapplied)
        self.divided.fold(rows, rows["residue"] & unapplied)
        lost = ~np.isfinite(rows["user_norm"]) & ~is_missing(rows["user_norm"])
        self.overflown_norms.fold(rows, lost & finite & ~broken & ~self._after_skip(rows))

    def cut(self) -> None:
        """Attempts were lost here: no row of them goes over it."""
        self._end_runs()
        self.still.run = 0
        self.norm.count = self.largest.count = 0
        self.norm.since = self.largest.since = None
        self.schedule.last = None
        self.skipped_last = self.unstepped_last = False

    def _pass_over(self) -> None:
        """Quiet attempts."""
        self._end_runs()
        self.skipped_last = self.unstepped_last = False

    def _end_runs(self) -> None:
        self.tied.end()
        for name in _SEEN:
            getattr(self, name).run = 0

    def _after_skip(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Attempts behind a skipped one, whose norm may have been logged late."""
        after: npt.NDArray[np.bool_] = np.append(self.skipped_last, rows["skipped"][:-1])
        self.skipped_last = bool(rows["skipped"][-1])
        return after


# Kinds that no quiet attempt is of; a step at a learning rate of 0 may be quiet.
_SEEN: Final = tuple(f.name for f in fields(Habits) if f.type == "Seen" and f.name != "still")


def _are_quiet(rows: Rows) -> npt.NDArray[np.bool_]:
    """Of which nothing is of a kind that is counted: steps taken, all of them finite."""
    quiet: npt.NDArray[np.bool_] = (
        rows["taken"]
        & ~(rows["unscaled"] | rows["residue"])
        & (rows["n_bad"] == 0)
        & np.isfinite(rows["loss"])
        & (rows["max_abs"] < FLOAT16_MAX)
        & (np.isfinite(rows["user_norm"]) | is_missing(rows["user_norm"]))
    )
    return quiet


def _is_even(rows: Rows) -> npt.NDArray[np.bool_]:
    """Whether elements are about as large as the largest, as after a clip by value that cuts most of them."""
    elements = np.maximum(rows["numel"] - rows["n_zero"], 1)
    even: npt.NDArray[np.bool_] = rows["norm"] * rows["scale"] >= EVEN * rows["max_abs"] * np.sqrt(elements)
    return even


def _is_put_there(largest: npt.NDArray[np.float64], scales: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether it is 1e5, 2e6 …, of two digits: a gradient is the scale times something, and holds so many fives by it alone."""
    with np.errstate(all="ignore"):
        tens = 10.0 ** np.floor(np.log10(largest) - 1)
        is_round = (largest > FLOAT16_MAX) & (largest % tens == 0)
        put: npt.NDArray[np.bool_] = is_round & (largest % FIVES == 0) & (scales % FIVES != 0)
    return put


def _is_round(value: float) -> bool:
    """Whether two digits say it: 1, 0.5, 0.25, 40."""
    return abs(float(f"{value:.{ROUND_DIGITS - 1}e}") - value) <= PINNED * value
