"""Reading tensors: their names, the heatmap over all of them, the histograms of one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.records import MISSING, Array, Table, is_missing, missing, to_json_list
from ampwatch.stats.layout import HIST_BINS, HIST_LOG2_MIN
from ampwatch_server import tables as t

from .blob import pack, unpack
from .paging import read_cursor, write_cursor
from .points import select
from .processes import EVERYONE, Source, processes_of, require_run
from .series import Range, integers, labels_at, require_tensor, tensor_cells, tensor_points
from .stats import STATS, Stat
from .tail import TailReader

_SAID_NOTHING: Final = pack({})
_SHORT_BYTES: Final = (
    1024  # of a description that is kept read: nearly all are shorter, and a client may send any
)
_NEVER: Final = np.iinfo(np.int64).max
BINS_LOG2: Final = tuple(range(HIST_LOG2_MIN, HIST_LOG2_MIN + HIST_BINS))


def list_tensors(
    connection: Connection, run: str, cursor: str | None, limit: int, source: Source = EVERYONE
) -> dict[str, Any]:
    """A page of tensors, by producer and id. RunNotFound."""
    require_run(connection, run)
    query = _query().where(
        t.producers.c.run == run,
        source.among(t.producers.c.rank, t.producers.c.producer),
        t.tensors.c.name != "",
    )  # an origin may come before its tensor
    query = query.order_by(t.tensors.c.producer, t.tensors.c.tensor)
    after = read_cursor(cursor, (int, int))
    if after is not None:
        place = sa.tuple_(t.tensors.c.producer, t.tensors.c.tensor)
        query = query.where(place > sa.tuple_(*map(sa.literal, after)))
    rows = connection.execute(query.limit(limit + 1)).all()
    page = rows[:limit]
    following = write_cursor((page[-1].producer_id, page[-1].tensor)) if len(rows) > limit else None
    return {"items": [_tensor(row) for row in page], "next": following}


def read_heatmap(
    connection: Connection,
    tails: TailReader,
    run: str,
    stat: str,
    asked: Range,
    *,
    source: Source = EVERYONE,
    rows: int | None = None,
) -> dict[str, Any]:
    """`Heatmap` of the lowest rank's last producer that recorded tensors, among those of `source`. RunNotFound.

    Arguments:
        rows: only so many tensors, those with the worst values, in their order.
    """
    kind = STATS[stat]
    for producer in _candidates(connection, run, source):
        found = tensor_cells(connection, tails, producer, stat, kind.worst, asked)
        if found is not None:
            stride, cells = found
            return _heatmap(connection, tails, producer, stat, kind, cells, stride, rows)
    return {"stat": stat, "unit": kind.unit, "tensors": [], "attempt": [], "step": [], "values": []}


def read_histograms(
    connection: Connection,
    tails: TailReader,
    run: str,
    tensor: int,
    asked: Range,
    source: Source = EVERYONE,
) -> dict[str, Any]:
    """Histograms of one tensor over attempts; where a point covers several, their sum. RunNotFound."""
    answer: dict[str, Any] = {"tensor": tensor, "bins_log2": list(BINS_LOG2)}
    for producer in _candidates(connection, run, source):
        for _, stride, points in tensor_points(connection, tails, producer, ["scale"], asked, hist=True):
            mine = select(points, points["tensor"] == tensor)
            if "hist" not in mine or not len(mine["attempt"]):
                continue
            with np.errstate(all="ignore"):
                scale = np.where(mine["scale:count"] > 0, mine["scale:sum"] / mine["scale:count"], MISSING)
            return answer | {
                "producer": producer.producer,
                "attempt": mine["attempt"].tolist(),
                "step": _steps(connection, tails, producer, mine["attempt"], stride),
                "scale": to_json_list(scale),
                "hist": mine["hist"].astype(np.int64).tolist(),
            }
    require_tensor(connection, run, tensor)
    return answer | {"producer": None, "attempt": [], "step": [], "scale": [], "hist": []}


def _candidates(connection: Connection, run: str, source: Source) -> list[Row[Any]]:
    """Producers of a run: the lowest rank's first, and of each rank the newest first."""
    producers = processes_of(connection, run, source)
    return sorted(producers, key=lambda p: (p.rank, -p.first_seen, -p.id))


def _heatmap(
    connection: Connection,
    tails: TailReader,
    producer: Row[Any],
    stat: str,
    kind: Stat,
    points: Table,
    stride: int,
    rows: int | None,
) -> dict[str, Any]:
    known = {row.tensor: _tensor(row) for row in connection.execute(_OF_ONE, {"mine": producer.id}).all()}
    ids, row = _distinct(points["tensor"])
    tensors = [known.get(int(i)) or _unnamed(producer, int(i)) for i in ids]
    columns, values = _grid(points, len(ids), row, stat, kind, stride)
    if kind.float16_only:
        values[[tensor["origin"] != "float16" for tensor in tensors]] = MISSING
    chosen = _worst_rows(values, kind, rows)
    shown = values if len(chosen) == len(values) else values[chosen]
    return {
        "stat": stat,
        "unit": kind.unit,
        "tensors": [tensors[i] for i in chosen],
        "attempt": columns.tolist(),
        "step": _steps(connection, tails, producer, columns, stride),
        "values": to_json_list(shown),
    }


def _steps(
    connection: Connection, tails: TailReader, producer: Row[Any], attempts: Array, stride: int
) -> list[Any]:
    return integers(labels_at(connection, tails, producer, attempts, stride, ("step",))["step"])


def _distinct(tensors: Array) -> tuple[Array, Array]:
    """The different ids, ascending, and the place of each tensor among them. Most follow on one like them."""
    starts = np.flatnonzero(np.diff(tensors, prepend=-1))
    ids, place = np.unique(tensors[starts], return_inverse=True)
    return ids, np.repeat(place, np.diff(starts, append=len(tensors)))


def _grid(points: Table, count: int, row: Array, stat: str, kind: Stat, stride: int) -> tuple[Array, Array]:
    """Attempts of the columns in which anything was recorded, and the worst value of each tensor in each.

    Arguments:
        count: tensors.
        row: which of them each point is of.
    """
    bins = points["attempt"] // stride
    column = bins - bins.min()
    first = np.full(int(column.max()) + 1, _NEVER)
    np.minimum.at(first, column, points["attempt"])
    values = missing((count, len(first)))
    pick = np.fmax if kind.worst == "max" else np.fmin
    pick.at(values.reshape(-1), row * len(first) + column, points[f"{stat}:{kind.worst}"])
    values[np.isnan(values)] = MISSING
    present = first < _NEVER
    return first[present], values[:, present]


def _worst_rows(values: Array, kind: Stat, rows: int | None) -> list[int]:
    if rows is None or rows >= len(values):
        return list(range(len(values)))
    sign = -1.0 if kind.worst == "max" else 1.0
    badness = np.where(is_missing(values), np.inf, sign * values).min(axis=1)
    return sorted(np.argsort(badness, kind="stable")[:rows].tolist())


def _query() -> sa.Select[Any]:
    joined = t.tensors.join(t.producers, t.producers.c.id == t.tensors.c.producer)
    row = t.tensors.c
    columns = (row.producer.label("producer_id"), row.tensor, row.name, row.origin, row.body)
    return sa.select(*columns, t.producers.c.producer, t.producers.c.rank).select_from(joined)


_OF_ONE: Final = _query().where(t.tensors.c.producer == sa.bindparam("mine"))


def _tensor(row: Row[Any]) -> dict[str, Any]:
    key = {"id": row.tensor, "rank": row.rank, "producer": row.producer, "name": row.name}
    return key | _description(row.body) | {"origin": row.origin}


def _description(body: bytes) -> dict[str, Any]:
    """What a client said of a tensor; None where it said nothing, or nothing of the right type. Not to be changed."""
    return _known_description(body) if len(body) <= _SHORT_BYTES else _read_description(body)


def _read_description(body: bytes) -> dict[str, Any]:
    given = unpack(body)
    found = {name: given.get(name) for name in ("module", "module_type", "dtype")}
    texts = {name: value if isinstance(value, str) else None for name, value in found.items()}
    shape = given.get("shape")
    whole = isinstance(shape, list) and all(map(_is_whole, shape))
    counts = {
        name: given.get(name) if _is_whole(given.get(name)) else None for name in ("numel", "optimizer")
    }
    return texts | {"shape": shape if whole else None} | counts


_known_description = lru_cache(maxsize=4096)(_read_description)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unnamed(producer: Row[Any], tensor: int) -> dict[str, Any]:
    """A tensor whose description has not arrived."""
    key = {"id": tensor, "rank": producer.rank, "producer": producer.producer, "name": f"tensor {tensor}"}
    return key | _description(_SAID_NOTHING) | {"origin": "unknown"}
