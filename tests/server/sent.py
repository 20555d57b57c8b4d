"""Batches as a training job sends them, and what tests do with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import sqlalchemy as sa

from ampwatch import records
from ampwatch.diagnosis.findings import Finding, Verdict
from ampwatch.records import Batch, Event
from ampwatch_server import tables as t
from ampwatch_server.db import Database
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.store import codec

P, Q = "ab" * 16, "cd" * 16
MSGPACK = {"Content-Type": "application/msgpack"}


class NoDiagnosis:
    """An engine that finds nothing, where findings are not what a test is about."""

    def add(self, batch: Batch) -> None:
        pass

    def findings(self) -> list[Finding]:
        return []

    def verdict(self) -> Verdict:
        return Verdict("no data", None, None, "nothing was looked at")


def key(seq: int = 0, *, producer: str = P, run: str = "r", rank: int = 0) -> dict[str, Any]:
    return {"producer": producer, "seq": seq, "run": run, "rank": rank}


def attempts(first: int, end: int, seq: int = 0, *, stream: int = 0, every: int = 1, **given: Any) -> Batch:
    """Attempts `first` to `end`, exclusive; the loss is the attempt, the step one more."""
    attempt = np.arange(first, end, every)
    columns = {
        "attempt": attempt,
        "stream": np.full(len(attempt), stream),
        "step": attempt + 1,
        "time": 1000.0 + attempt,
        "scale": np.full(len(attempt), 65536.0),
        "found_inf": np.zeros(len(attempt)),
        "loss": attempt.astype(float),
    }
    header = {name: given.pop(name) for name in ("producer", "run", "rank") if name in given}
    return records.pack_table("attempts", columns | given, **key(seq, **header))


def tensors(attempt: list[int], tensor: list[int], seq: int = 0, **given: Any) -> Batch:
    n = len(attempt)
    columns = {
        "attempt": attempt,
        "tensor": tensor,
        "scale": np.full(n, 4.0),
        "numel": np.full(n, 100),
        "n_inf": np.zeros(n),
        "n_nan": np.zeros(n),
        "n_zero": np.full(n, 10),
        "n_subnormal": np.full(n, 20),
        "max_abs": np.full(n, 65504.0 / 8),
        "sum_sq": np.full(n, 64.0),
        "hist": np.tile(np.eye(1, 64, 40, dtype=np.int64) * 90, (n, 1)),
    }
    header = {name: given.pop(name) for name in ("producer", "run", "rank") if name in given}
    return records.pack_table("tensors", columns | given, **key(seq, **header))


def events(*given: Event, seq: int = 0, **header: Any) -> Batch:
    return records.pack_events(given, **key(seq, **header))


def named(*names: str, origin: str = "float16") -> list[Event]:
    """The events that introduce tensors."""
    described = [
        {"id": i, "name": name, "module": name, "module_type": "Linear", "shape": [10, 10], "dtype": "float32",
         "numel": 100, "optimizer": 0}
        for i, name in enumerate(names)
    ]  # fmt: skip
    origins = {str(i): origin for i in range(len(names))}
    return [
        Event("tensors", 1.0, data={"tensors": described}),
        Event("origin", 1.0, data={"origins": origins}),
    ]


def store(service: Service, *batches: Batch, fold: bool = True) -> None:
    """Append batches, and let the compactor pass over their runs."""
    for future in [service.inbox.append(batch, check(batch)) for batch in batches]:
        future.result()
    if fold:
        for run in {batch.run for batch in batches}:
            service.compactor.process(run)


def post(client: httpx.Client, batch: Batch, **headers: str) -> httpx.Response:
    return client.post("/v1/batches", content=records.to_bytes(batch), headers=MSGPACK | headers)


def send(client: httpx.Client, *batches: Batch) -> None:
    for batch in batches:
        assert post(client, batch).status_code == 200


def allow_pages(database: Database, pages: int) -> None:
    """Bound a SQLite database, as a full disk does: it cannot grow beyond, nor shrink below what it has."""
    database.write(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {pages}"))


def attempts_of(service: Service, run: str) -> int | None:
    with service.database.read() as connection:
        query = sa.select(sa.func.sum(t.producers.c.attempts)).where(t.producers.c.run == run)
        return connection.execute(query).scalar()


def until(answer: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """What `answer` says once it says anything; fails after a while."""
    deadline = time.monotonic() + timeout_s
    while not (found := answer()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.01)
    return found


def all_chunks(service: Service, table: sa.Table = t.chunks) -> dict[tuple[Any, ...], dict[str, list[Any]]]:
    """Every chunk (or part) by its place, decoded."""
    c = table.c
    query = sa.select(t.producers.c.producer, c.kind, c.stream, c.level, c.first, c.data, c.hist).join(
        t.producers
    )
    with service.database.read() as connection:
        return {
            tuple(row[:5]): {
                name: records.to_json_list(column)
                for name, column in codec.decode(row.data, None, row.hist).items()
            }
            for row in connection.execute(query)
        }
