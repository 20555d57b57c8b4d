"""The store by itself: rows appended, and folded with the diagnosis, in a second of CPU time; bytes stored a row.

    python benchmarks/store.py [--windows 6]

No HTTP: the inbox's durable commit, then one pass of the compactor, on a fresh SQLite file, all in this process. CPU time is of
all its threads, so other work on the machine shows little. Bytes are those of chunks and parts, all levels.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import sqlalchemy as sa
import tables

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch_server import tables as t
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings


def measure(kind: str, rows: dict[str, np.ndarray], length: int, batches: int, folder: str) -> str:
    service = Service(Settings(str(Path(folder) / f"{kind}.db")), Diagnosis)
    sent = [
        tables.batch(kind, rows | {"attempt": rows["attempt"] + i * length}, i, "run", "ab" * 16)
        for i in range(batches + 1)  # the last one stays in the inbox: its window is not complete
    ]
    began = time.process_time()
    for future in [service.inbox.append(batch, check(batch)) for batch in sent]:
        future.result()
    appended = time.process_time()
    service.compactor.process("run")
    folded = time.process_time()
    stored = 0
    with service.database.read() as connection:
        for table in (t.chunks, t.parts):
            for column in (table.c.data, table.c.hist):
                stored += connection.execute(sa.select(sa.func.sum(sa.func.length(column)))).scalar() or 0
    service.database.close()
    n = batches * len(rows["attempt"])
    append, fold = n / (appended - began), n / (folded - appended)
    return f"{kind}: {append:,.0f} rows/s appended, {fold:,.0f} rows/s folded and diagnosed, {stored / n:.1f} B a row"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=6, help="windows of 1,024 attempts of 300 tensors")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        print(measure("attempts", tables.attempts(rng, 0, 10_240), 10_240, 10, folder))
        recorded = np.arange(0, 1024, tables.EVERY)
        print(measure("tensors", tables.tensors(rng, recorded, 300), 1024, given.windows, folder))


if __name__ == "__main__":
    main()
