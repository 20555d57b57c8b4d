"""The summary of a run: what the list of runs shows, kept beside the run so that the list costs nothing."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.records import Table

from . import tables as t
from .store.cover import Where, read_points, read_rows, streams_of
from .store.points import real
from .store.tail import Key, TailReader
from .store.windows import MAX_ATTEMPT, TOP_LEVEL, WINDOW, point_size, stride_for

SPARKLINE_POINTS: Final = 60


def count_attempts(connection: Connection, tails: TailReader, producer_id: int) -> dict[str, int]:
    """Attempts and skipped attempts of a producer, each counted once."""
    tail = tails.read(connection, producer_id, "attempts", ("found_inf",))
    stride = point_size("attempts", TOP_LEVEL)
    counts = {"attempts": 0, "skipped": 0}
    for stream in streams_of(connection, producer_id, "attempts", tail):
        where = Where(producer_id, "attempts", stream)
        points = read_points(connection, where, (0, MAX_ATTEMPT), TOP_LEVEL, stride, ["found_inf"], tail)
        counts["attempts"] += int(points["rows"].sum())
        counts["skipped"] += int(points["found_inf:sum"].sum())
    return counts


def summarise(connection: Connection, tails: TailReader, run: str, given: Collection[Key]) -> dict[str, Any]:
    """Attempts, last values, pace and sparkline of a run, by its lowest rank; builtins that may hold NaN.

    Arguments:
        given: of what waits in the inbox only this is looked at: behind an outage there may be far more.
    """
    mine = t.producers.c.run == run
    lowest = sa.select(sa.func.min(t.producers.c.rank)).where(mine).scalar_subquery()
    query = sa.select(t.producers).where(mine, t.producers.c.rank == lowest)
    first_rank = connection.execute(query.order_by(t.producers.c.first_seen)).all()
    attempts, skipped = (sum(getattr(p, name) for p in first_rank) for name in ("attempts", "skipped"))
    with_rows = [p for p in first_rank if p.attempts]
    summary: dict[str, Any] = {"attempts": attempts, "taken": attempts - skipped, "skipped": skipped}
    summary |= _last_values(connection, tails, with_rows[-1], given) if with_rows else {}
    return summary | {"sparkline": _sparkline(connection, tails, with_rows, given)}


def _last_values(
    connection: Connection, tails: TailReader, producer: Row[Any], given: Collection[Key]
) -> dict[str, Any]:
    tail = tails.read(connection, producer.id, "attempts", among=given)
    span = (max(0, producer.end_attempt - WINDOW), producer.end_attempt)
    streams = streams_of(connection, producer.id, "attempts", tail)
    read = (read_rows(connection, Where(producer.id, "attempts", stream), span, tail) for stream in streams)
    found = [rows for rows in read if rows is not None]
    if not found:
        return {}
    newest = max(found, key=lambda rows: rows["attempt"][-1])
    last = {name: column[-1].item() for name, column in newest.items() if column.ndim == 1}
    scale = last.get("scale_after", last["scale"])
    values = {"step": last.get("step"), "scale": scale, "loss": last.get("loss")}
    return values | {"attempt_s": _usual_s(found)}


def _usual_s(streams: list[Table]) -> float:
    """The median time from one attempt to the next, s; 0 where it is not known."""
    attempt, time = (np.concatenate([real(rows, name) for rows in streams]) for name in ("attempt", "time"))
    passed = np.diff(time[np.argsort(attempt, kind="stable")])
    passed = passed[np.isfinite(passed)]
    return max(0.0, float(np.median(passed))) if len(passed) else 0.0


def _sparkline(
    connection: Connection, tails: TailReader, producers: list[Row[Any]], given: Collection[Key]
) -> dict[str, list[float]]:
    """Mean loss and lowest scale of about 60 stretches of the first stream, one producer after the other."""
    loss: list[float] = []
    scale: list[float] = []
    total = sum(p.end_attempt for p in producers)
    for producer in producers:
        tail = tails.read(connection, producer.id, "attempts", ("loss", "scale"), among=given)
        streams = streams_of(connection, producer.id, "attempts", tail)
        if not streams:  # counted, but all of it waits to be looked at
            continue
        level, stride = stride_for("attempts", total, SPARKLINE_POINTS)
        where, span = Where(producer.id, "attempts", streams[0]), (0, producer.end_attempt)
        points = read_points(connection, where, span, level, stride, ["loss", "scale"], tail)
        loss += [
            s / n if n else math.nan for s, n in zip(*_lists(points, "loss:sum", "loss:count"), strict=True)
        ]
        scale += [math.log2(s) if s > 0 else math.nan for s in points["scale:min"].tolist()]
    return {"loss": loss[-SPARKLINE_POINTS:], "scale_log2": scale[-SPARKLINE_POINTS:]}


def _lists(points: Table, *names: str) -> list[list[float]]:
    return [points[name].tolist() for name in names]
