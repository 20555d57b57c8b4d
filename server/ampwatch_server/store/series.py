"""Reading series: columns over attempts, about as many points as were asked for, no spike lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.errors import RunNotFound
from ampwatch.records import MISSING, Array, Table, to_json_list
from ampwatch_server import tables as t

from .cover import Where, read_cells, read_labels, read_points, read_rows, streams_of
from .points import LABELS, concat, real, select
from .processes import EVERYONE, Source, processes_of
from .stats import inputs_of
from .tail import Tail, TailReader
from .windows import stride_for

_EXACT = 1 << 16  # attempts over which the labels of each are looked up, not those of its point


class Range(NamedTuple):
    """What to read: attempts `first` to `last` inclusive (None: the end), in about `points` points.

    `through`: they are counted through the processes of a rank, as on a page, and not from the start of each.
    """

    first: int = 0
    last: int | None = None
    points: int = 600
    through: bool = False


def read_series(
    connection: Connection,
    tails: TailReader,
    run: str,
    names: Sequence[str],
    asked: Range,
    *,
    source: Source = EVERYONE,
    stream: int | None = None,
) -> dict[str, Any]:
    """`Series` of the columns of attempts, one entry for each producer and stream. RunNotFound."""
    found = []
    for producer in processes_of(connection, run, source):
        tail = tails.read(connection, producer.id, "attempts")
        span = _span(producer, asked)
        level, stride = _stride(producer, "attempts", span, asked.points)
        for index in streams_of(connection, producer.id, "attempts", tail):
            if stream not in (None, index):
                continue
            where = Where(producer.id, "attempts", index)
            points = read_points(connection, where, span, level, stride, names, tail)
            if len(points["attempt"]):
                found.append(_stream(producer, index, stride, points, names))
    return {"run": run, "names": list(names), "streams": found}


def read_tensor_series(
    connection: Connection,
    tails: TailReader,
    run: str,
    tensor: int,
    names: Sequence[str],
    asked: Range,
    source: Source = EVERYONE,
) -> dict[str, Any]:
    """`Series` of the statistics of one tensor, one entry for each producer and stream that has it. RunNotFound."""
    found = []
    for producer in processes_of(connection, run, source):
        for index, stride, points in tensor_points(connection, tails, producer, names, asked):
            mine = select(points, points["tensor"] == tensor)
            if len(mine["attempt"]):
                mine |= labels_at(connection, tails, producer, mine["attempt"], stride)
                found.append(_stream(producer, index, stride, mine, names))
    if not found:
        require_tensor(connection, run, tensor)
    return {"run": run, "names": list(names), "streams": found}


def tensor_points(
    connection: Connection,
    tails: TailReader,
    producer: Row[Any],
    names: Sequence[str],
    asked: Range,
    *,
    hist: bool = False,
) -> list[tuple[int, int, Table]]:
    """Points of all tensors of a producer: (stream, stride, points) for each stream that has any."""
    needed = inputs_of(names) | ({"hist"} if hist else set())
    tail = tails.read(connection, producer.id, "tensors", needed)
    span = _span(producer, asked)
    level, stride = _stride(producer, "tensors", span, asked.points)
    found = []
    for index in streams_of(connection, producer.id, "tensors", tail):
        where = Where(producer.id, "tensors", index)
        points = read_points(connection, where, span, level, stride, names, tail, hist=hist)
        if len(points["attempt"]):
            found.append((index, stride, points))
    return found


def tensor_cells(
    connection: Connection, tails: TailReader, producer: Row[Any], name: str, part: str, asked: Range
) -> tuple[int, Table] | None:
    """One part of one statistic of all tensors of a producer, and the stride of its points; None without any.

    Where a table holds several values for one stride, they stand beside each other.
    """
    tail = tails.read(connection, producer.id, "tensors", inputs_of([name]))
    span = _span(producer, asked)
    level, stride = _stride(producer, "tensors", span, asked.points)
    cells: list[Table] = []
    for index in streams_of(connection, producer.id, "tensors", tail):
        where = Where(producer.id, "tensors", index)
        cells += read_cells(connection, where, span, level, stride, name, part, tail)
    found = [table for table in cells if len(table["attempt"])]
    return (stride, concat(found)) if found else None


def labels_at(
    connection: Connection,
    tails: TailReader,
    producer: Row[Any],
    attempts: Array,
    stride: int,
    names: Sequence[str] = LABELS,
) -> dict[str, Array]:
    """Step and time at each of these attempts, which the rows of tensors do not carry; missing where not known.

    Over more than 65,536 attempts they are those at which a point of at most `stride` attempts begins.
    """
    tail = tails.read(connection, producer.id, "attempts")
    span = (int(attempts.min()), int(attempts.max()) + 1)
    exact = span[1] - span[0] <= _EXACT and span[0] >= producer.attempts_from
    level = 0 if exact else stride_for("attempts", stride, 1, lowest=1)[0]
    found = [
        table
        for index in streams_of(connection, producer.id, "attempts", tail)
        for table in _labels(connection, Where(producer.id, "attempts", index), span, level, names, tail)
        if len(table["attempt"])
    ]
    if not found:
        return {label: np.full(len(attempts), MISSING) for label in names}
    at = np.concatenate([table["attempt"] for table in found])
    order = np.argsort(at, kind="stable")
    place = np.searchsorted(at[order], attempts, side="right") - 1
    labels = {name: np.concatenate([real(table, name) for table in found])[order][place] for name in names}
    return {name: np.where(place >= 0, column, MISSING) for name, column in labels.items()}


def _labels(
    connection: Connection,
    where: Where,
    span: tuple[int, int],
    level: int,
    names: Sequence[str],
    tail: Tail,
) -> list[Table]:
    if level:
        return read_labels(connection, where, span, level, names, tail)
    rows = read_rows(connection, where, span, tail, names)
    return [] if rows is None else [rows]


def require_tensor(connection: Connection, run: str, tensor: int) -> None:
    """RunNotFound where a run has no such tensor."""
    joined = t.tensors.join(t.producers, t.producers.c.id == t.tensors.c.producer)
    query = sa.select(t.tensors.c.tensor).select_from(joined)
    if (
        connection.execute(query.where(t.producers.c.run == run, t.tensors.c.tensor == tensor)).first()
        is None
    ):
        raise RunNotFound(
            f"run {run!r} has no tensor {tensor}; GET /v1/runs/{run}/tensors lists those it has"
        )


def _span(producer: Row[Any], asked: Range) -> tuple[int, int]:
    begins = producer.begins if asked.through else 0
    end = producer.end_attempt
    if asked.last is not None:
        end = max(0, min(asked.last + 1 - begins, end))
    return min(max(0, asked.first - begins), end), end


def _stride(producer: Row[Any], kind: str, span: tuple[int, int], points: int) -> tuple[int, int]:
    """Level and stride for about so many points; what is gone by age is read from the level above."""
    gone = span[0] < (producer.attempts_from if kind == "attempts" else producer.tensors_from)
    return stride_for(kind, span[1] - span[0], points, lowest=1 if gone else 0)


def _stream(
    producer: Row[Any], index: int, stride: int, points: Table, names: Sequence[str]
) -> dict[str, Any]:
    return {
        "rank": producer.rank,
        "producer": producer.producer,
        "stream": index,
        "stride": stride,
        "attempt": points["attempt"].tolist(),
        "step": integers(points["step"]),
        "time": to_json_list(points["time"]),
        "series": {name: _series(points, name, stride) for name in names},
    }


def _series(points: Table, name: str, stride: int) -> dict[str, list[Any]]:
    count, nan = points[f"{name}:count"], points[f"{name}:nan"]
    infinite = points[f"{name}:pinf"] + points[f"{name}:ninf"]
    with np.errstate(all="ignore"):
        mean = np.where(count > 0, points[f"{name}:sum"] / count, MISSING)
    low, high = points[f"{name}:min"], points[f"{name}:max"]
    if stride == 1:
        low = high = mean = _itself(points, name)
    shown = {"min": low, "max": high, "mean": mean, "count": count, "nan": nan, "inf": infinite}
    return {part: to_json_list(column) for part, column in shown.items()}


def _itself(points: Table, name: str) -> Array:
    """The value of points that hold one row each."""
    value: Array = points[f"{name}:min"].copy()
    value[points[f"{name}:nan"] > 0] = np.nan
    value[points[f"{name}:pinf"] > 0] = np.inf
    value[points[f"{name}:ninf"] > 0] = -np.inf
    return value


def integers(column: Array) -> list[Any]:
    """Integers that were carried as reals, as integers again."""
    return [int(v) if isinstance(v, float) else v for v in to_json_list(column)]
