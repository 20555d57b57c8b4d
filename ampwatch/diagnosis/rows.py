"""The attempts of one producer, kept small and in order, so that late batches can be folded again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ampwatch.records import OPTIMIZER_PREFIX, Table, is_missing, missing

from .steps import Steps

JOINED: Final = 256  # rows: tables of fewer wait for each other, as a few rows cost as much as so many
UNCOUNTED: Final = 4  # attempts of a producer in which its optimizers are first seen

LOGGED: Final = {
    "batch": ("log.batch_id", "log.batch", "log.batch_idx"),
    "epoch": ("log.epoch",),
    "user_norm": ("log.grad_norm", "log.gradient_norm", "log.total_norm", "log.norm"),
}
"""Names by which people log what the diagnosis can use."""

ROW: Final = np.dtype(
    [
        ("attempt", "<i8"),
        ("step", "<i8"),
        ("stream", "<i4"),
        ("skipped", "|b1"),
        ("taken", "|b1"),  # an optimizer was stepped
        ("unstepped", "|b1"),  # gradients were unscaled, and no optimizer was stepped
        ("idle", "|b1"),  # an update() with nothing before it, as one that sets the scale by hand
        ("gaps", "<i4"),  # stretches of attempts before it that were not recorded
        ("applied", "|b1"),  # a gradient became inf or NaN as it was unscaled, and was applied
        ("unscaled", "|b1"),  # stepped in a window in which no scale() was seen
        ("still", "|b1"),  # a step was taken at a learning rate of 0, in every group
        ("penalised", "|b1"),  # more losses than accumulations: a loss made of scaled gradients
        ("time", "<f8"),
        ("scale", "<f8"),
        ("scale_after", "<f8"),
        ("loss", "<f8"),
        ("norm", "<f8"),
        ("numel", "<i8"),
        ("n_bad", "<i8"),
        ("n_zero", "<i8"),
        ("max_abs", "<f8"),
        ("counted", "<f8"),  # steps that the state of its optimizers counts; missing where none does
        ("residue", "|b1"),
        ("stepped", "<i8"),  # bits, as the next
        ("skips", "<i8"),
        ("micro_batches", "<i4"),
        ("batch", "<f8"),  # what was logged; missing where it was not
        ("epoch", "<f8"),
        ("user_norm", "<f8"),
        ("lr", "<f8"),
    ]
)
"""What the diagnosis keeps of an attempt: 165 bytes."""

Rows = npt.NDArray[Any]
"""A one-dimensional array of `ROW`."""


class _Mark(NamedTuple):
    """Where a ledger stands after a row."""

    last: int = -1  # attempt of that row
    gaps: int = 0  # stretches of attempts before it that are not there …
    missing: int = 0  # … how many attempts they are …
    first_missing: int = -1  # … and the first of them


class Ledger:
    """All rows of a producer in the order of their attempts, whatever order they came in.

    `add` takes a table; `take` answers the rows that were not taken yet, or, if one came late, says so and
    answers all of them: a fold then starts anew. In order, both cost what the new rows cost. Where memory must
    not grow, `forget` lets go of the oldest, and a fold starts anew from there.

    Arguments:
        whole: attempts that are not there were lost; a trace may hold some of them on purpose.
    """

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self._begun = self._mark = _Mark()  # before the first row that is held, and after the last one taken
        self._taken: list[Rows] = []
        self._waiting: list[Rows] = []
        self._small: list[Table] = []  # what came after those, a few rows each …
        self._small_rows = 0  # … and how many together
        self._steps = Steps()
        self.restarts = 0  # how often a late row let the fold begin anew

    @property
    def forgotten(self) -> int:
        """Attempt of the last row that was forgotten; -1 before."""
        return self._begun.last

    @property
    def last(self) -> int:
        """Attempt of the last row taken; -1 before."""
        return self._mark.last

    @property
    def missing(self) -> int:
        """How many attempts between the first and the last are not there."""
        return self._mark.missing

    @property
    def first_missing(self) -> int:
        """The first of them, -1 where there is none."""
        return self._mark.first_missing

    @property
    def waiting(self) -> int:
        """Rows that were not taken yet, late ones included."""
        return sum(map(len, self._waiting)) + self._small_rows

    def add(self, table: Table) -> None:
        """Keep the rows of an `attempts` table."""
        if len(table["attempt"]):
            self._small.append(table)
            self._small_rows += len(table["attempt"])
            if self._small_rows >= JOINED:
                self._join()

    def take(self) -> tuple[Rows, bool]:
        """The rows to fold now, and whether they begin again: from the first, or from where the ledger has forgotten."""
        self._join()
        new = _sorted(self._waiting)
        self._waiting = []
        new = new[np.searchsorted(new["attempt"], self._begun.last, side="right") :]
        if not len(new):
            return new, False
        again = bool(new["attempt"][0] <= self.last)
        if again:
            new = _sorted([*self._taken, new])
            self._taken, self._mark = [], self._begun
            self.restarts += 1
        self._mark = self._after(self._mark, new)
        self._taken.append(new)
        return new, again

    def forget(self, upto: int) -> None:
        """Let go of the rows up to this attempt; what comes of them later is left out."""
        rows, held = self.between(self._begun.last, upto), self.between(upto, self.last).copy()
        if len(rows):
            self._begun = self._after(self._begun, rows)
            self._steps.add(rows)
            self._taken = [held]

    def _join(self) -> None:
        self._waiting += [_rows_of(table) for table in _by_columns(self._small)]
        self._small, self._small_rows = [], 0

    def _after(self, mark: _Mark, rows: Rows) -> _Mark:
        """Where the ledger stands after these rows, which follow a mark; what is lost before each is filled in."""
        attempts = rows["attempt"]
        before = np.append(mark.last if mark.last >= 0 else attempts[0] - 1, attempts[:-1])
        lost = (attempts - before - 1) * self._whole
        rows["gaps"] = mark.gaps + np.cumsum(lost > 0)
        first = mark.first_missing
        if lost.any() and first < 0:
            first = int(before[np.argmax(lost > 0)]) + 1
        return _Mark(int(attempts[-1]), int(rows["gaps"][-1]), mark.missing + int(lost.sum()), first)

    def between(self, after: int, upto: int) -> Rows:
        """The rows taken with after < attempt <= upto, in order."""
        blocks = []
        for block in reversed(self._taken):
            first, last = np.searchsorted(block["attempt"], (after, upto), side="right")
            if last > first:
                blocks.append(block[first:last])
            if first > 0:
                break
        return _joined(blocks[::-1])

    def all(self) -> Rows:
        """Every row that was taken and is held, in order."""
        return _joined(self._taken)

    def step_of(self, attempt: int) -> int:
        """The step of an attempt; after the newest row before it, if it has none, and itself if none came before."""
        for block in reversed(self._taken):
            if len(block) and block["attempt"][0] <= attempt:
                row = block[np.searchsorted(block["attempt"], attempt, side="right") - 1]
                return int(row["step"]) + int(row["attempt"] < attempt and row["taken"])
        return self._steps.of(attempt)


def runs_of(values: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of equal values."""
    if len(values) == 0:
        return
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    yield from zip([0, *edges.tolist()], [*edges.tolist(), len(values)], strict=True)


def are_nonfinite(losses: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which losses are inf or NaN; one that is missing is not."""
    bad: npt.NDArray[np.bool_] = ~np.isfinite(losses)
    if bad.any():
        bad &= ~is_missing(losses)
    return bad


def _joined(blocks: list[Rows]) -> Rows:
    if len(blocks) == 1:
        return blocks[0]
    ends = np.cumsum([0, *map(len, blocks)])
    rows = np.empty(ends[-1], dtype=ROW)
    for block, start in zip(blocks, ends, strict=False):  # np.concatenate would compare 28 fields first
        rows[start : start + len(block)] = block
    return rows


def _by_columns(tables: list[Table]) -> Iterator[Table]:
    """The tables in their order, neighbours with the same columns as one."""
    for names, alike in groupby(tables, key=list):
        some = list(alike)
        yield some[0] if len(some) == 1 else {name: np.concatenate([t[name] for t in some]) for name in names}


def _rows_of(table: Table) -> Rows:
    rows = np.zeros(len(table["attempt"]), dtype=ROW)
    rows["attempt"], rows["scale"] = table["attempt"], table["scale"]
    rows["step"] = table.get("step", table["attempt"])
    rows["scale_after"] = table.get("scale_after", table["scale"])
    for name in ("stream", "numel", "n_zero"):
        rows[name] = table.get(name, 0)
    nothing = missing(len(rows))
    for name in ("time", "loss", "norm", "lr", "max_abs"):
        rows[name] = table.get(name, nothing)
    for name, logged in LOGGED.items():
        rows[name] = next((table[column] for column in logged if column in table), nothing)
    rows["residue"], rows["skips"] = table.get("residue", 0), table.get("skipped", 0)
    rows["stepped"], rows["micro_batches"] = table.get("stepped", 0), table.get("micro_batches", -1)
    rows["n_bad"] = np.asarray(table.get("n_inf", 0)) + np.asarray(table.get("n_nan", 0))
    rows["penalised"] = _penalised(table, len(rows))
    # a trace without found_inf: of torch's policy, a scale that fell proves a skip
    rows["skipped"] = table["found_inf"] != 0 if "found_inf" in table else rows["scale_after"] < rows["scale"]
    stepped = np.asarray(table.get("stepped", np.ones(len(rows)))) != 0
    rows["taken"] = stepped & ~rows["skipped"]
    rows["still"] = rows["taken"] & _at_rate_zero(table)
    rows["counted"] = _counted(table)
    rows["unstepped"] = ~stepped & (rows["numel"] > 0)
    spoiled = ~np.isfinite(rows["norm"]) & ~is_missing(rows["norm"])  # told by a trace
    rows["applied"] = table.get("applied_nonfinite", rows["taken"] & spoiled)
    rows["unscaled"] = stepped & (np.asarray(table.get("losses", 1)) == 0)
    rows["idle"] = ~stepped & (rows["numel"] == 0) & (np.asarray(table.get("losses", 1)) == 0)
    return rows


def _penalised(table: Table, rows: int) -> npt.NDArray[np.bool_]:
    """A gradient penalty scales the loss, differentiates it, and makes the loss that is accumulated of the result.

    Accumulations are not counted yet in the very first attempts: several losses are given the benefit of the doubt.
    """
    unknown = np.full(rows, -1)
    accumulated, losses = (np.asarray(table.get(name, unknown)) for name in ("micro_batches", "losses"))
    uncounted = (accumulated < 1) & (table["attempt"] < UNCOUNTED)
    return (losses > 1) & (uncounted | ((accumulated >= 1) & (losses > accumulated)))


def _counted(table: Table) -> npt.NDArray[np.float64]:
    """Of several optimizers the most, as not each steps in every attempt."""
    counted = missing(len(table["attempt"]))
    for name, steps in table.items():
        if name.startswith(OPTIMIZER_PREFIX) and name.endswith(".step"):
            counted = np.fmax(counted, steps)
    return counted


def _at_rate_zero(table: Table) -> npt.NDArray[np.bool_]:
    """Where the learning rate is 0, and where there are several, each of those that are known."""
    zero: npt.NDArray[np.bool_] = np.asarray(table.get("lr", missing(len(table["attempt"])))) == 0
    for name, rates in table.items():
        if zero.any() and name.startswith(OPTIMIZER_PREFIX) and ".lr." in name:
            zero &= (rates == 0) | is_missing(rates)
    return zero


def _sorted(blocks: list[Rows]) -> Rows:
    rows = _joined(blocks)
    attempts = rows["attempt"]
    if np.any(attempts[1:] <= attempts[:-1]):
        _, first = np.unique(attempts, return_index=True)
        rows = rows[first]
    return rows
