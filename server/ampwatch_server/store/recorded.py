"""Reading a run as a replay takes it: the attempts of one scaler of a rank, and samples of its tensors."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.diagnosis.described import Described
from ampwatch.records import Event, Table
from ampwatch.replay.recorded import COLUMNS
from ampwatch.replay.recording import Recording, joined, part_of
from ampwatch.replay.underflow import SAMPLES, spread
from ampwatch_server import tables as t

from .blob import unpack
from .cover import Where, read_rows, streams_of
from .processes import EVERYONE, Source, processes_of
from .tail import Tail, TailReader
from .windows import window_size

_DESCRIBING: Final = ("scaler", "stream", "origin")
_HISTOGRAMS: Final = ("tensor", "scale", "n_zero", "n_inf", "n_nan", "hist")


def read_recording(
    connection: Connection, tails: TailReader, run: str, source: Source = EVERYONE, scaler: int = 0
) -> Recording:
    """The recording of the processes of a source that are of its lowest rank. RunNotFound."""
    processes = [process for process in processes_of(connection, run, source) if process.end_attempt]
    lowest = min((process.rank for process in processes), default=0)
    world = len({process.rank for process in processes_of(connection, run)})
    parts = []
    for process in (process for process in processes if process.rank == lowest):
        described = _described(connection, process.id)
        attempts = _attempts(connection, process.id, process.end_attempt, tails)
        tensors = _samples(connection, process.id, process.end_attempt, tails)
        parts.append(part_of(described, attempts, tensors, world, scaler))
    return joined(parts)


def version_of(connection: Connection, run: str) -> tuple[float, int] | None:
    """When a run began, and the count of its changes that a reader can see: another run of its id has another start."""
    query = sa.select(t.runs.c.started, t.run_state.c.revision).join(
        t.run_state, t.run_state.c.run == t.runs.c.run
    )
    row = connection.execute(query.where(t.runs.c.run == run)).one_or_none()
    return None if row is None else (row.started, row.revision)


def _described(connection: Connection, producer_id: int) -> Described:
    query = sa.select(t.events.c.body).where(
        t.events.c.producer == producer_id, t.events.c.type.in_(_DESCRIBING)
    )
    described = Described()
    bodies = connection.scalars(query.order_by(t.events.c.time, t.events.c.id))
    described.add(msgspec.convert(unpack(body), Event) for body in bodies)
    return described


def _attempts(connection: Connection, producer_id: int, end: int, tails: TailReader) -> list[Table]:
    tail = tails.read(connection, producer_id, "attempts")
    names = {*COLUMNS, "time", "stream"}
    found = []
    for stream in streams_of(connection, producer_id, "attempts", tail):
        where = Where(producer_id, "attempts", stream)
        rows = read_rows(connection, where, (0, end), tail, names)
        if rows is not None:
            found.append(rows | {"stream": np.full(len(rows["attempt"]), stream)})
    return found


def _samples(connection: Connection, producer_id: int, end: int, tails: TailReader) -> list[Table]:
    """The tensors of at most 24 attempts of each stream, or of one in each of 24 windows."""
    tail = tails.read(connection, producer_id, "tensors")
    found = []
    for stream in streams_of(connection, producer_id, "tensors", tail):
        where = Where(producer_id, "tensors", stream)
        spans = _spans(connection, where, end, tail)
        of_each = -(-SAMPLES // max(1, len(spans)))
        for span in spans:
            rows = read_rows(connection, where, span, tail, _HISTOGRAMS)
            if rows is not None and "hist" in rows:
                chosen = spread(np.unique(rows["attempt"]), of_each).tolist()
                found += [_at(rows, attempt, stream) for attempt in chosen]
    return found


def _spans(connection: Connection, where: Where, end: int, tail: Tail) -> list[tuple[int, int]]:
    """Windows that hold rows, at most 24, evenly spread."""
    size = window_size(0)
    query = sa.select(t.chunks.c.first).where(
        t.chunks.c.producer == where.producer_id,
        t.chunks.c.kind == where.kind,
        t.chunks.c.stream == where.stream,
        t.chunks.c.level == 0,
    )
    firsts = sorted({*connection.scalars(query), *tail.touched(where.stream)})
    chosen = np.unique(np.linspace(0, max(len(firsts) - 1, 0), SAMPLES).round().astype(int))
    return [(firsts[i], min(firsts[i] + size, end)) for i in chosen] if firsts else []


def _at(rows: Table, attempt: int, stream: int) -> Table:
    inside = rows["attempt"] == attempt
    table = {name: column[inside] for name, column in rows.items()}
    return table | {"stream": np.full(int(inside.sum()), stream)}
