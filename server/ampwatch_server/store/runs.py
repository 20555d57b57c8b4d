"""Reading and editing runs, as docs/rest.md shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch_server import tables as t
from ampwatch_server.db import text
from ampwatch_server.live import News
from ampwatch_server.outdated import still_judged
from ampwatch_server.settings import Settings

from .blob import jsonable, unpack
from .paging import read_cursor, write_cursor
from .processes import not_found, processes_of

STATUSES: Final = ("live", "finished", "stalled", "crashed")
MISSING_SHOWN: Final = 100
STALLED_ATTEMPTS: Final = 20  # a slow run is not stalled before so many of its usual attempts could have come
EDGE_S: Final = 10.0  # how long a change of status by time is looked for; who watches looks every second
LATE_S: Final = 30.0  # after its end a run waits so long for what is missing; events overtake the rest
NO_VERDICT: Final = {
    "word": "no data",
    "severity": None,
    "kind": None,
    "sentence": "Nothing has been diagnosed yet.",
    "first_step": -1,
    "module": "",
    "tensor": "",
}

_NAME: Final = sa.func.coalesce(t.runs.c.name, t.runs.c.given_name)
_ORDERS: Final[dict[str, tuple[sa.ColumnElement[Any], bool]]] = {
    "-last_seen": (t.runs.c.last_seen, True),
    "last_seen": (t.runs.c.last_seen, False),
    "-started": (t.runs.c.started, True),
    "started": (t.runs.c.started, False),
    "name": (_NAME, False),
}
ORDERS: Final = tuple(_ORDERS)


def list_runs(
    connection: Connection,
    settings: Settings,
    *,
    only: str | None = None,
    project: str | None,
    status: str | None,
    q: str | None,
    order: str,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """A page of runs. `only`: those of this project, whatever is asked for."""
    column, descending = _ORDERS[order]
    query = _query(settings).order_by(
        column.desc() if descending else column, t.runs.c.run.desc() if descending else t.runs.c.run
    )
    for wanted in (only, project):
        if wanted is not None:
            query = query.where(t.runs.c.project == text(wanted))
    if status is not None:
        query = query.where(status_now(settings) == status)
    if q:
        query = query.where(_matches(q))
    after = read_cursor(cursor, (str if order == "name" else float, str))
    if after is not None:
        place, key = sa.tuple_(column, t.runs.c.run), sa.tuple_(*map(sa.literal, after))
        query = query.where(place < key if descending else place > key)
    rows = connection.execute(query.limit(limit + 1)).all()
    page = rows[:limit]
    answer: dict[str, Any] = {"items": [_run(connection, row) for row in page], "next": None}
    if len(rows) > limit:
        label = "sort_name" if order == "name" else order.lstrip("-")
        answer["next"] = write_cursor((getattr(page[-1], label), page[-1].run))
    return answer


def get_run(connection: Connection, settings: Settings, run: str) -> dict[str, Any]:
    """One run. RunNotFound."""
    row = connection.execute(_query(settings).where(t.runs.c.run == run)).one_or_none()
    if row is None:
        raise not_found(run)
    return _run(connection, row)


def edit_run(connection: Connection, run: str, changes: dict[str, Any]) -> None:
    """Set name, tags, notes or archived, those that are given. RunNotFound."""
    values: dict[str, Any] = {
        name: text(changes[name], 65536) for name in ("name", "notes") if name in changes
    }
    if "tags" in changes:
        values["tags"] = write_tags(changes["tags"])
    if "archived" in changes:
        values["archived"] = changes["archived"]
    exists = t.runs.update().where(t.runs.c.run == run).values(values or {"run": run})
    if connection.execute(exists).rowcount != 1:
        raise not_found(run)
    touch(connection, run)


def delete_run(connection: Connection, run: str) -> None:
    """Delete a run and all that hangs on it. RunNotFound."""
    if connection.execute(t.runs.delete().where(t.runs.c.run == run)).rowcount != 1:
        raise not_found(run)


def write_tags(tags: Iterable[object]) -> str:
    """Tags as the JSON that `runs` keeps, in which text can be searched for."""
    return msgspec.json.encode([text(tag) for tag in tags]).decode()


def status_now(settings: Settings) -> sa.ColumnElement[str]:
    """The status of a run by the server's clock."""
    now, runs = settings.clock(), t.runs.c
    return sa.case(
        (sa.and_(runs.ended, sa.or_(runs.complete, runs.last_seen < now - LATE_S)), "finished"),
        (runs.last_seen < now - settings.silent_s, "crashed"),
        (sa.and_(runs.last_attempt < now - settings.stalled_s, _stalls_at() < now), "stalled"),
        else_="live",
    )


def _stalls_at() -> sa.ColumnElement[float]:
    """The moment at which a run has missed `STALLED_ATTEMPTS` attempts, by the median of those before."""
    usual_s = sa.select(t.run_state.c.attempt_s).where(t.run_state.c.run == t.runs.c.run).correlate(t.runs)
    return t.runs.c.last_attempt + STALLED_ATTEMPTS * usual_s.scalar_subquery()


def touch(connection: Connection, run: str) -> None:
    """A person changed something of a run: whoever watches it is told, and what was cached of it is old."""
    latest = sa.select(sa.func.max(t.run_state.c.changed)).scalar_subquery()
    state = t.run_state.update().where(t.run_state.c.run == run)
    connection.execute(state.values(revision=t.run_state.c.revision + 1, changed=latest, **still_judged()))


def changed_since(connection: Connection, settings: Settings, since: float) -> News:
    """The runs that changed after a moment, and those whose status has just become another by the passing of time."""
    now, runs = settings.clock(), t.runs.c
    edges = (
        _just_past(runs.last_seen, now - settings.silent_s),
        _just_past(runs.last_seen, now - LATE_S),
        _just_past(runs.last_attempt, now - settings.stalled_s),
        sa.and_(
            runs.last_attempt < now - settings.stalled_s,
            runs.last_seen >= now - settings.silent_s,
            _just_past(_stalls_at(), now),
        ),
    )
    query = _query(settings).where(sa.or_(t.run_state.c.changed > since, *edges))
    query = query.order_by(t.run_state.c.changed)
    return _news(connection, connection.execute(query).all(), since)


def _just_past(column: sa.ColumnElement[float], edge: float) -> sa.ColumnElement[bool]:
    return column.between(edge - EDGE_S, edge)


def news_now(
    connection: Connection, settings: Settings, run: str | None, limit: int, *, only: str | None = None
) -> News:
    """A run as it is now, or those seen last; `only`: of this project."""
    query = _query(settings).order_by(t.runs.c.last_seen.desc()).limit(limit)
    for column, wanted in ((t.runs.c.run, run), (t.runs.c.project, only)):
        if wanted is not None:
            query = query.where(column == wanted)
    rows = connection.execute(query).all()
    latest = connection.execute(sa.select(sa.func.max(t.run_state.c.changed))).scalar()
    return _news(connection, rows, latest or 0.0)


def _news(connection: Connection, rows: Sequence[Row[Any]], since: float) -> News:
    latest = max((row.changed for row in rows), default=since)
    return [(row.revision, live_state(connection, row)) for row in rows], max(since, latest)


def live_state(connection: Connection, row: Row[Any]) -> dict[str, Any]:
    """What the event stream says of a run."""
    query = sa.select(t.producers.c.producer, t.producers.c.last_seq).where(t.producers.c.run == row.run)
    summary = unpack(row.summary)
    return {
        "run": row.run,
        "cursor": {
            row.producer: row.last_seq for row in connection.execute(query.order_by(t.producers.c.id))
        },
        "attempts": summary.get("attempts", 0),
        "scale": jsonable(summary.get("scale")),
        "verdict": jsonable(unpack(row.verdict) or NO_VERDICT),
        "status": row.status,
        "project": row.project,
    }


def _query(settings: Settings) -> sa.Select[Any]:
    state = t.run_state.c
    return sa.select(
        t.runs,
        _NAME.label("sort_name"),
        status_now(settings).label("status"),
        state.summary,
        state.verdict,
        state.changed,
        state.revision,
    ).join(t.run_state, state.run == t.runs.c.run)


def _matches(q: str) -> sa.ColumnElement[bool]:
    tags = sa.func.coalesce(t.runs.c.tags, t.runs.c.given_tags)
    columns = (t.runs.c.run, _NAME, t.runs.c.project, t.runs.c.notes, tags)
    return sa.or_(*(column.icontains(text(q), autoescape=True) for column in columns))


def _run(connection: Connection, row: Row[Any]) -> dict[str, Any]:
    summary = unpack(row.summary)
    producers = _producers(connection, row.run)
    described = _described(connection, row.run)
    return {
        "run": row.run,
        "project": row.project,
        "name": row.sort_name,
        "tags": msgspec.json.decode(row.given_tags if row.tags is None else row.tags),
        "notes": row.notes,
        "archived": row.archived,
        "status": row.status,
        "started": row.started,
        "last_seen": row.last_seen,
        **{name: summary.get(name, 0) for name in ("attempts", "taken", "skipped")},
        **{name: jsonable(summary.get(name)) for name in ("step", "scale", "loss")},
        "producers": producers,
        "verdict": jsonable(unpack(row.verdict) or NO_VERDICT),
        "sparkline": jsonable(summary.get("sparkline", {"loss": [], "scale_log2": []})),
        **described,
    }


def _producers(connection: Connection, run: str) -> list[dict[str, Any]]:
    return [
        {
            "producer": row.producer,
            "rank": row.rank,
            "host": row.host,
            "device": row.device,
            "attempts": row.attempts,
            "skipped": row.skipped,
            "begins": row.begins,
            "last_seq": row.last_seq,
            "last_seen": row.last_seen,
            "missing": _missing(connection, row) if row.received <= row.last_seq else [],
            "finished": row.finished,
        }
        for row in processes_of(connection, run)
    ]


def _missing(connection: Connection, producer: Row[Any]) -> list[int]:
    """The first 100 sequence numbers below the last one that have not arrived."""
    seq = t.receipts.c.seq
    mine = sa.select(seq, sa.func.lag(seq, 1, -1).over(order_by=seq).label("before"))
    gaps = mine.where(t.receipts.c.producer == producer.id).subquery()
    query = sa.select(gaps).where(gaps.c.seq > gaps.c.before + 1).order_by(gaps.c.seq).limit(MISSING_SHOWN)
    found: list[int] = []
    for after, before in connection.execute(query):
        found += range(before + 1, min(after, before + 1 + MISSING_SHOWN - len(found)))
    return found[:MISSING_SHOWN]


def _described(connection: Connection, run: str) -> dict[str, Any]:
    """What the events of the first rank's last producer describe: config, versions, scalers, optimizers."""
    types = ("run", "scaler", "optimizers")
    query = (
        sa.select(t.events.c.type, t.events.c.body, t.events.c.producer)
        .join(t.producers, t.producers.c.id == t.events.c.producer)
        .where(t.events.c.run == run, t.events.c.type.in_(types))
        .order_by(t.producers.c.rank, t.producers.c.first_seen.desc(), t.events.c.seq, t.events.c.place)
    )
    rows = connection.execute(query).all()
    first = [(row.type, unpack(row.body).get("data", {})) for row in rows if row.producer == rows[0].producer]
    told: dict[str, Any] = next((data for kind, data in first if kind == "run"), {})
    world_size = told.get("world_size")
    optimizers = [item for kind, data in first if kind == "optimizers" for item in _items(data, "optimizers")]
    return {
        "world_size": world_size if isinstance(world_size, int) else None,
        "config": jsonable(_object(told, "config")),
        "versions": jsonable(_object(told, "versions")),
        "scalers": jsonable([data for kind, data in first if kind == "scaler"]),
        "optimizers": jsonable(list({str(item.get("id")): item for item in optimizers}.values())),
    }


def _object(data: dict[str, Any], name: str) -> dict[Any, Any]:
    given = data.get(name)
    return given if isinstance(given, dict) else {}


def _items(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of a list in the data of an event, whatever a client made of it."""
    given = data.get(name)
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
