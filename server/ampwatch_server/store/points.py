"""Points: rows summarised over equal stretches of attempts, and over nothing else.

A table of points has the labels `attempt`, `step`, `time` of the first row of each point, `rows`, for tensors
`tensor` and `hist` (summed), and for every column `c` of the rows: `c:min`, `c:max`, `c:sum`, `c:count` over finite
values, and the counts `c:nan`, `c:pinf`, `c:ninf`. A missing value counts nowhere. Merging is associative but for
the rounding of sums, so points of points are those of the rows; no spike is ever averaged away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import numpy as np

from ampwatch.records import MISSING, Array, Table, is_missing, missing
from ampwatch.stats.layout import HIST_BINS

from .blocks import side_by_side

LABELS: Final = ("step", "time")
KEYS: Final = ("attempt", "stream", "tensor", "seq", *LABELS)

_COUNTS: Final = ("count", "nan", "pinf", "ninf")
PARTS: Final = ("min", "max", "sum", *_COUNTS)


def columns_of(names: Iterable[str], *, tensors: bool) -> set[str]:
    """Names of the columns that points of these names consist of, labels included."""
    own = {f"{name}:{part}" for name in names for part in PARTS}
    return own | {"attempt", "rows", *LABELS} | ({"tensor"} if tensors else set())


def names_of(points: Table) -> list[str]:
    """The columns that a table of points summarises."""
    return [column.removesuffix(":min") for column in points if column.endswith(":min")]


def from_rows(rows: Table, names: Collection[str], parts: Sequence[str] = PARTS) -> Table:
    """Each row as a point of its own, with these parts. A name that the rows lack is missing everywhere.

    Parts that are the same are one array, as the counts of all that is finite are: `merge` and the codec, which cost
    more, then do their work once.
    """
    n = len(rows["attempt"])
    ones, zeros = np.ones(n, np.int64), np.zeros(n, np.int64)
    points: Table = {"attempt": rows["attempt"], "rows": ones}
    points |= {label: real(rows, label) for label in LABELS}
    points |= {name: rows[name] for name in ("tensor", "hist") if name in rows}
    for name in names:
        values = real(rows, name)
        finite = np.isfinite(values)
        if finite.all():
            points |= {
                f"{name}:{part}": {"count": ones}.get(part, zeros) for part in parts if part in _COUNTS
            }
            points |= {f"{name}:{part}": values for part in parts if part not in _COUNTS}
        else:
            points |= {f"{name}:{part}": _PART[part](values, finite) for part in parts}
    return points


def merge(points: Table, stride: int) -> Table:
    """Points over `stride` attempts each (and per tensor), in order of tensor and attempt."""
    if not len(points["attempt"]):
        return points
    points = _ordered(points)
    starts = _starts(points, stride)
    if len(starts) == len(points["attempt"]):
        return points
    made: dict[tuple[int, str], Array] = {}
    merged: Table = {}
    for name, column in points.items():
        key_of = id(column), _way_of(name)
        if key_of not in made:
            made[key_of] = _WAYS[key_of[1]](column, starts)
        merged[name] = made[key_of]
    return merged


def summarise(rows: Table, names: Sequence[str], stride: int) -> Table:
    """`merge(from_rows(rows, names), stride)`, columns side by side: of a thousand rows each call costs most."""
    if not len(rows["attempt"]):
        return from_rows(rows, names)
    rows = _ordered(rows)
    starts = _starts(rows, stride)
    counts = np.diff(starts, append=len(rows["attempt"]))
    points: Table = {"attempt": rows["attempt"][starts], "rows": counts}
    points |= {label: real(rows, label)[starts] for label in LABELS}
    points |= {name: rows[name][starts] for name in ("tensor",) if name in rows}
    points |= {name: _sum(rows[name], starts) for name in ("hist",) if name in rows}
    zeros = np.zeros(len(starts), np.int64)
    for some in side_by_side(names, len(rows["attempt"])):
        values = np.stack([real(rows, name) for name in some])
        finite = np.isfinite(values)
        whole = finite.all(axis=1)
        parts = {part: _reduced(part, values, finite, starts) for part in ("min", "max", "sum")}
        for i, name in enumerate(some):
            points |= {f"{name}:{part}": parts[part][i] for part in parts}
            if whole[i]:
                points |= {f"{name}:{part}": counts if part == "count" else zeros for part in _COUNTS}
            else:
                points |= {
                    f"{name}:{part}": _sum(_PART[part](values[i], finite[i]), starts) for part in _COUNTS
                }
    return points


def concat(tables: Sequence[Table]) -> Table:
    """Tables one after the other. A column that some lack is missing there, or counts nothing there."""
    if len(tables) == 1:
        return tables[0]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: np.concatenate([_column(table, name) for table in tables]) for name in names}


def select(table: Table, chosen: Array | slice) -> Table:
    """The rows of a table that a mask, an order or a slice chooses."""
    distinct = {id(column): column for column in table.values()}
    made = {key: column[chosen] for key, column in distinct.items()}
    return {name: made[id(column)] for name, column in table.items()}


def _only(values: Array, finite: Array) -> Array:
    return np.where(finite, values, MISSING)


_PART: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "min": _only,
    "max": _only,
    "sum": lambda values, finite: np.where(finite, values, 0.0),
    "count": lambda _, finite: finite.astype(np.int64),
    "nan": lambda values, _: (np.isnan(values) & ~is_missing(values)).astype(np.int64),
    "pinf": lambda values, _: (values == np.inf).astype(np.int64),
    "ninf": lambda values, _: (values == -np.inf).astype(np.int64),
}


def _way_of(name: str) -> str:
    """How the column of this name is reduced."""
    part = name.rpartition(":")[2]
    return part if part in _WAYS else "first" if part in ("attempt", "tensor", *LABELS) else "sum"


def _ordered(table: Table) -> Table:
    """The table in order of tensor and attempt."""
    tensor = table.get("tensor")
    later = np.diff(table["attempt"]) < 0
    if tensor is not None:
        by_tensor = np.diff(tensor)
        later = (by_tensor < 0) | ((by_tensor == 0) & later)
    if not later.any():
        return table
    keys = (table["attempt"],) if tensor is None else (table["attempt"], tensor)
    return select(table, np.lexsort(keys))


def _starts(table: Table, stride: int) -> Array:
    """Where each point of a table in order begins."""
    new = np.diff(table["attempt"] // stride) != 0
    if "tensor" in table:
        new |= np.diff(table["tensor"]) != 0
    return np.concatenate(([0], np.flatnonzero(new) + 1))


def _reduced(part: str, values: Array, finite: Array, starts: Array) -> Array:
    """One of `min`, `max` and `sum` of the finite values of each point; (columns, points)."""
    if part == "sum":
        return _sum(values if finite.all() else np.where(finite, values, 0.0), starts, axis=1)
    least = np.fmin if part == "min" else np.fmax
    if finite.all():
        return least.reduceat(values, starts, axis=1)
    return _known(least.reduceat(np.where(finite, values, np.nan), starts, axis=1))


def _sum(column: Array, starts: Array, axis: int = 0) -> Array:
    with np.errstate(over="ignore"):
        return np.add.reduceat(column, starts, axis=axis)


def _known(extremes: Array) -> Array:
    """The reduction of nothing but missing values is missing, whatever NaN it left."""
    return np.where(np.isnan(extremes), MISSING, extremes)


_WAYS: Final[dict[str, Callable[[Array, Array], Array]]] = {
    "min": lambda column, starts: _known(np.fmin.reduceat(column, starts)),
    "max": lambda column, starts: _known(np.fmax.reduceat(column, starts)),
    "first": lambda column, starts: column[starts],
    "sum": _sum,
}


def real(rows: Table, name: str) -> Array:
    """A column of a table with `attempt` as float64; one that it lacks is missing everywhere."""
    return rows[name].astype(np.float64) if name in rows else missing(len(rows["attempt"]))


def _column(table: Table, name: str) -> Array:
    if name in table:
        return table[name]
    n, part = len(table["attempt"]), name.rpartition(":")[2]
    if part == "hist":
        return np.zeros((n, HIST_BINS), np.int64)
    if part in _COUNTS:
        return np.zeros(n, np.int64)
    return np.zeros(n) if part == "sum" else missing(n)
