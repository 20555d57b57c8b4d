"""Events become rows: the events themselves, and what they say of runs, producers and tensors.

Every event is kept as it came. What is derived from several (the run's description, the origin of a tensor) does
not depend on the order in which they arrive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.records import Batch, Event

from . import tables as t
from .db import text, upsert
from .store.blob import pack, unpack
from .store.runs import write_tags

_ID: Final = re.compile(r"[0-9]{1,10}\Z")  # as the keys of a JSON object carry it


def insert_events(connection: Connection, producer_id: int, batch: Batch, now: float) -> None:
    """Store the events of a batch, and apply what they describe. Doing it twice changes nothing."""
    events = batch.events()
    rows = [
        {
            "producer": producer_id,
            "run": batch.run,
            "seq": batch.seq,
            "place": place,
            "type": event.type,
            "time": event.time if math.isfinite(event.time) else now,
            "attempt": event.attempt,
            "last": _last(event),
            "body": pack(event),
        }
        for place, event in enumerate(events)
    ]
    if rows:
        connection.execute(upsert(connection, t.events).on_conflict_do_nothing(), rows)
    for event in events:
        _apply(connection, producer_id, event)


def describe_run(connection: Connection, run: str, *, caught_up: bool) -> bool:
    """Take project, name and tags of a run from its first description (lowest rank, then earliest), its start and end.

    A run began when a process first said so, which for a folder that is read long afterwards is not when it was read;
    but never after its first record came, whatever the clock of that process showed.

    Arguments:
        caught_up: everything that was received has been diagnosed.
    Returns: whether it has ended.
    """
    query = (
        sa.select(t.events.c.body)
        .join(t.producers, t.producers.c.id == t.events.c.producer)
        .where(t.events.c.run == run, t.events.c.type == "run")
        .order_by(t.producers.c.rank, t.events.c.time, t.producers.c.producer)
        .limit(1)
    )
    data = _data(connection.execute(query).scalar())
    end = _end(connection, run, caught_up=caught_up)
    described = {
        "project": sa.case(
            (t.runs.c.bound, t.runs.c.project), else_=sa.literal(text(data.get("project", "")))
        ),
        "given_name": text(data.get("name", "")),
        "given_tags": write_tags(_list(data.get("tags"))),
        **_start(connection, run),
        **end,
    }
    connection.execute(t.runs.update().where(t.runs.c.run == run).values(described))
    return end["ended"]


def _last(event: Event) -> int:
    """The attempt of its last repetition, as far as databases can count."""
    return min(event.attempt + max(1, event.repeat) - 1, 2**63 - 1) if event.attempt >= 0 else event.attempt


def _apply(connection: Connection, producer_id: int, event: Event) -> None:
    data = event.data
    mine = t.producers.update().where(t.producers.c.id == producer_id)
    if event.type == "run":
        values = {"host": text(data.get("host", "")), "device": text(data.get("device", ""))}
        connection.execute(mine.values(values))
    elif event.type == "finish":
        connection.execute(mine.values(finished=True, announced=_count(data.get("attempts"))))
    elif event.type == "tensors":
        _insert_tensors(connection, producer_id, _list(data.get("tensors")))
    elif event.type == "origin":
        _set_origins(connection, producer_id, data.get("origins"))


def _insert_tensors(connection: Connection, producer_id: int, given: Iterable[Any]) -> None:
    rows = [
        {
            "producer": producer_id,
            "tensor": described["id"],
            "name": text(described.get("name", "")),
            "origin": "unknown",
            "body": pack(described),
        }
        for described in given
        if isinstance(described, Mapping) and _is_id(described.get("id"))
    ]
    if rows:
        statement = upsert(connection, t.tensors)
        new = {name: statement.excluded[name] for name in ("name", "body")}
        connection.execute(
            statement.on_conflict_do_update(index_elements=["producer", "tensor"], set_=new), rows
        )


def _set_origins(connection: Connection, producer_id: int, origins: Any) -> None:
    rows = [
        {"producer": producer_id, "tensor": int(key), "name": "", "origin": text(origin), "body": pack({})}
        for key, origin in (origins.items() if isinstance(origins, Mapping) else ())
        if _ID.match(str(key)) and _is_id(int(key))
    ]
    if rows:
        statement = upsert(connection, t.tensors)
        new = {"origin": statement.excluded.origin}
        connection.execute(
            statement.on_conflict_do_update(index_elements=["producer", "tensor"], set_=new), rows
        )


def _start(connection: Connection, run: str) -> dict[str, Any]:
    told = sa.select(sa.func.min(t.events.c.time)).where(
        t.events.c.run == run, t.events.c.type == "run", t.events.c.time > 0
    )
    begun = connection.execute(told).scalar()
    started = t.runs.c.started
    return {} if begun is None else {"started": sa.case((started > begun, begun), else_=started)}


def _end(connection: Connection, run: str, *, caught_up: bool) -> dict[str, bool]:
    """How the last producer of every rank stands; one that a restart replaced need not have ended."""
    row = t.producers.c
    columns = (row.rank, row.finished, row.received, row.last_seq, row.end_attempt, row.announced)
    query = sa.select(*columns).where(row.run == run)
    last = {
        producer.rank: producer for producer in connection.execute(query.order_by(row.first_seen, row.id))
    }
    gaps = any(p.received <= p.last_seq or p.end_attempt < p.announced for p in last.values())
    return {"ended": all(p.finished for p in last.values()), "complete": caught_up and not gaps}


def _data(body: bytes | None) -> dict[str, Any]:
    data = unpack(body).get("data", {}) if body is not None else {}
    return data if isinstance(data, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _count(value: Any) -> int:
    return value if _is_id(value) else 0
