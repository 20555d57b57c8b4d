"""Batches for the tests of spool, transport and recorder."""

import numpy as np

from ampwatch import records
from ampwatch.records import Event

PRODUCER = "0123456789abcdef" * 2
OTHER = "f" * 32


def events(seq, *types, run="r", producer=PRODUCER):
    made = [Event(type, time=float(seq)) for type in types or ("heartbeat",)]
    return records.pack_events(made, producer=producer, seq=seq, run=run, rank=0)


def attempts(seq, first=0, rows=2, run="r", producer=PRODUCER, **columns):
    table = {"attempt": np.arange(first, first + rows), "scale": np.full(rows, 2.0**16)} | columns
    return records.pack_table("attempts", table, producer=producer, seq=seq, run=run, rank=0)


def tensors(seq, attempt=0, rows=2, run="r", producer=PRODUCER):
    table = {
        "attempt": np.full(rows, attempt),
        "tensor": np.arange(rows),
        "scale": np.full(rows, 2.0**16),
        "numel": np.full(rows, 10),
    }
    return records.pack_table("tensors", table, producer=producer, seq=seq, run=run, rank=0)
