"""Episodes: consecutive attempts that were skipped or whose loss was not finite, and which of them are ordinary."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ampwatch.records import is_missing

from .moments import NEVER, Moment, moment_of
from .trends import Trend

CALIBRATION_ATTEMPTS: Final = (
    30  # after the first step taken, in which a few more skips belong to calibration
)
CALIBRATION_RUN: Final = 4
PROBE_RUN: Final = 2  # × hysteresis, which is 1 for torch's policy
PROBE_DEPTH: Final = 4  # the scale of a probe is at least a quarter of the highest clean one
PROBES_PER_INTERVAL: Final = 2
PROBE_INTERVALS: Final = 5
SOON: Final = 64  # attempts from a loss that broke to one that breaks again
BESIDE: Final = 5  # attempts in a row in which one optimizer is skipped and another steps
NEAR: Final = 2.0**-64  # a scale on its way to where its reciprocal is infinite
LARGE: Final = 4.0  # × the median of the losses before: a skip with such a loss is a spike's


@dataclass(slots=True)
class Episode:
    """Consecutive attempts of one stream that were skipped or whose loss was not finite.

    `high` is the highest clean scale of the two growth intervals before it, 0 where there was none.
    `lr` is that of the last step before it. `loss_before` is the median loss of the attempts before. `closed` is the first clean attempt after it.
    """

    first: Moment
    scale: float
    high: float
    taken_before: int
    lr: float
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
    near: Moment | None = None  # the first attempt that left the scale below 2^-64
    alone: tuple[int, int] = (0, 0)  # the newest `starved` and `stepping` to last at a scale of 1
    always: int = -1  # bits of optimizers that were skipped in every attempt
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
        if self.near is None and 0 <= self.scale_after < NEAR:
            self.near = moment
        if self.steps_beside and self.at_one and not self.nonfinite:
            self.alone = self.starved, self.stepping

    def _note_optimizers(self, starved: int, stepping: int) -> None:
        """Count the attempts in which the same optimizers were skipped while the same others stepped."""
        self.always &= starved
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
    def steps_beside(self) -> bool:
        """Whether an optimizer was stepped in the last attempts while another was skipped in every one."""
        return self.starved > 0 and self.stepping > 0 and self.beside >= BESIDE

    @property
    def is_large(self) -> bool:
        """Whether its last loss is finite and stands out."""
        return math.inf > self.loss_last >= LARGE * self.loss_before > 0

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


def is_descending(scale: float) -> bool:
    """Whether a scale is one from which halvings lead to where a step is taken: above 1, and finite."""
    return bool(1 < scale < math.inf)


def _is_nonfinite(loss: float) -> bool:
    return not np.isfinite(loss) and not bool(is_missing(loss))
