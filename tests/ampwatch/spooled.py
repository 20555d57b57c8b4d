"""Batches for the tests of spool, transport and recorder."""

import gzip

import httpx
import numpy as np

from ampwatch import records
from ampwatch.records import Event
from ampwatch.sender import TOGETHER

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


def posted(request):
    """The batches of a request."""
    data = gzip.decompress(request.content)
    is_one = request.headers["Content-Type"] != TOGETHER
    return [records.from_bytes(each) for each in ([data] if is_one else records.split(data))]


def answered(request, *told):
    """The response to a request whose batches are answered by these: (status, body), or with Retry-After in s."""
    if request.headers["Content-Type"] != TOGETHER:
        ((status, body, *again),) = told
        return httpx.Response(status, json=body, headers={"Retry-After": str(again[0])} if again else {})
    each = [
        {"status": status, "body": body} | ({"retry_after_s": again[0]} if again else {})
        for status, body, *again in told
    ]
    return httpx.Response(200, json={"answers": each})
