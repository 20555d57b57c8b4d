"""The store by itself: rows appended, folded, and folded with the diagnosis, in a second of CPU time; bytes stored a row.

    python benchmarks/store.py [--windows 6]

No HTTP: the inbox's durable commit, then the compactor's looks, once with an engine that does nothing and once with the real one, on a fresh SQLite file, all in this process. CPU time is of
all its threads, so other work on the machine shows little. Bytes are those of chunks and parts, all levels.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sqlalchemy as sa
import tables

from ampwatch import records
from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.diagnosis.findings import Finding, Verdict
from ampwatch_server import tables as t
from ampwatch_server.diagnoser import Engine
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings


class NoDiagnosis:
    """An engine that finds nothing."""

    def add(self, batch: records.Batch) -> None:
        pass

    def findings(self) -> list[Finding]:
        return []

    def verdict(self) -> Verdict:
        return Verdict("no data", None, None, "nothing was looked at")


def measure(kind: str, rows: dict[str, np.ndarray], length: int, batches: int) -> str:
    """What is printed of one kind of rows."""
    once(kind, rows, length, 1, Diagnosis)  # what is made once in a process
    n = batches * len(rows["attempt"])
    appended_s, folded_s, stored = once(kind, rows, length, batches, NoDiagnosis)
    _, diagnosed_s, _ = once(kind, rows, length, batches, Diagnosis)
    rates = (
        f"{n / s:,.0f} rows/s {done}"
        for s, done in (
            (appended_s, "appended"),
            (folded_s, "folded"),
            (diagnosed_s, "folded and diagnosed"),
        )
    )
    return f"{kind}: {', '.join(rates)}, {stored / n:.1f} B a row"


def once(
    kind: str, rows: dict[str, np.ndarray], length: int, batches: int, engine: Callable[[], Engine]
) -> tuple[float, float, int]:
    """Seconds of CPU time until all is appended, and then until it is folded; the bytes of its chunks and parts."""
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Settings(str(Path(folder) / "ampwatch.db")), engine)
        appended_s, folded_s = timed(service, kind, rows, length, batches)
        stored = 0
        with service.database.read() as connection:
            for table in (t.chunks, t.parts):
                for column in (table.c.data, table.c.hist):
                    stored += connection.execute(sa.select(sa.func.sum(sa.func.length(column)))).scalar() or 0
        service.database.close()
    return appended_s, folded_s, stored


def timed(
    service: Service, kind: str, rows: dict[str, np.ndarray], length: int, batches: int
) -> tuple[float, float]:
    """Append and fold."""
    sent = [
        tables.batch(kind, rows | {"attempt": rows["attempt"] + i * length}, i, "run", "ab" * 16)
        for i in range(batches + 1)  # the last one stays in the inbox: its window is not complete
    ]
    began = time.process_time()
    for future in [service.inbox.append(batch, check(batch)) for batch in sent]:
        future.result()
    appended = time.process_time()
    service.compactor.process("run")
    return appended - began, time.process_time() - appended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=6, help="windows of 1,024 attempts of 300 tensors")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    print(measure("attempts", tables.attempts(rng, 0, 10_240), 10_240, 10))
    recorded = np.arange(0, 1024, tables.EVERY)
    print(measure("tensors", tables.tensors(rng, recorded, 300), 1024, given.windows))


if __name__ == "__main__":
    main()
