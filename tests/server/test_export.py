"""Exports: every row as it was recorded, in flat memory, holding nothing back."""

from __future__ import annotations

import csv
import io
import json
import math
import tracemalloc

import httpx
import pytest
import sent
import sqlalchemy as sa

from ampwatch.errors import RunNotFound
from ampwatch.records import MISSING, Event
from ampwatch_server.serve import Running
from ampwatch_server.service import Service
from ampwatch_server.store.export import Asked, Exporter, Format
from ampwatch_server.store.processes import Source


def exported(service: Service, asked: Asked, form: Format = "ndjson") -> list[dict[str, object]]:
    text = b"".join(Exporter(service.database, service.tails, "r", asked).write(form)).decode()
    if form == "csv":
        return list(csv.DictReader(io.StringIO(text)))
    return json.loads(text)["rows"] if form == "json" else [json.loads(line) for line in text.splitlines()]


def test_rows_are_those_that_were_sent_from_chunks_and_tail(service: Service) -> None:
    sent.store(service, sent.attempts(0, 2000, 0))
    sent.store(service, sent.attempts(2000, 2500, 1), fold=False)
    rows = exported(service, Asked("attempts"))
    assert [row["attempt"] for row in rows] == list(range(2500))
    first = {"rank": 0, "producer": sent.P, "attempt": 0, "stream": 0, "step": 1, "time": 1000.0}
    assert rows[0] == first | {"scale": 65536.0, "found_inf": 0, "loss": 0.0}
    assert exported(service, Asked("attempts"), "json") == rows


def test_what_is_no_number_keeps_its_name(service: Service) -> None:
    loss = [math.nan, math.inf, -math.inf, MISSING]
    sent.store(service, sent.attempts(0, 4, loss=loss))
    assert [row["loss"] for row in exported(service, Asked("attempts"))] == [
        "NaN",
        "Infinity",
        "-Infinity",
        None,
    ]
    as_csv = exported(service, Asked("attempts"), "csv")
    assert [row["loss"] for row in as_csv] == ["NaN", "Infinity", "-Infinity", ""]


def test_a_csv_has_a_column_for_all_that_was_logged_anywhere(service: Service) -> None:
    sent.store(service, sent.attempts(0, 1024, 0))
    sent.store(service, sent.attempts(1024, 2048, 1, **{"log.b": [1.0] * 1024}))
    sent.store(service, sent.attempts(2048, 2050, 2, **{"log.a": [2.0, 3.0]}), fold=False)
    rows = exported(service, Asked("attempts"), "csv")
    assert list(rows[0])[-2:] == ["log.a", "log.b"]
    assert [(rows[i]["log.a"], rows[i]["log.b"]) for i in (0, 1024, 2049)] == [
        ("", ""),
        ("", "1.0"),
        ("3.0", ""),
    ]


def test_tensors_are_called_by_name(service: Service) -> None:
    sent.store(service, sent.events(*sent.named("=cmd()")), sent.tensors([0, 25], [0, 1], 1))
    rows = exported(service, Asked("tensors"))
    assert [(row["attempt"], row["name"]) for row in rows] == [(0, "=cmd()"), (25, "tensor 1")]
    assert rows[0]["hist"] == [0] * 40 + [90] + [0] * 23
    as_csv = exported(service, Asked("tensors"), "csv")[0]
    assert (as_csv["name"], as_csv["hist"].count(" "), as_csv["lost_share"]) == ("'=cmd()", 63, "0.0")


def test_no_cell_is_a_formula(service: Service) -> None:
    names = [start + "1+1" for start in ("=", "+", "-", "@", "\t", "\r")]
    tensors = sent.tensors([0] * 6, list(range(6)), 1)
    sent.store(service, sent.events(*sent.named(*names), Event("skip", 1.0, data={"a": "=1"})), tensors)
    assert [row["name"] for row in exported(service, Asked("tensors"), "csv")] == [
        f"'{name}" for name in names
    ]
    assert exported(service, Asked("events"), "csv")[-1]["data"] == '{"a":"=1"}'


def test_source_and_range_choose(service: Service) -> None:
    sent.store(service, sent.attempts(0, 1500, 0), sent.attempts(0, 9, 0, producer=sent.Q, rank=1))
    assert len(exported(service, Asked("attempts", Source(rank=1)))) == 9
    some = exported(service, Asked("attempts", Source(producer=sent.P), 1020, 1030))
    assert [row["attempt"] for row in some] == list(range(1020, 1031))
    with pytest.raises(RunNotFound):
        Exporter(service.database, service.tails, "x", Asked("attempts"))


def test_every_event_is_exported(service: Service) -> None:
    sent.store(service, sent.events(*(Event("skip", float(i), attempt=i) for i in range(1500))))
    assert [row["attempt"] for row in exported(service, Asked("events"))] == list(range(1500))


def test_memory_stays_that_of_one_part(service: Service) -> None:
    sent.store(service, sent.attempts(0, 60_000, 0))
    exporter = Exporter(service.database, service.tails, "r", Asked("attempts"))
    pieces = exporter.write("ndjson")
    next(pieces)
    tracemalloc.start()
    size = sum(map(len, pieces))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 8_000_000
    assert peak < 4_000_000


def test_a_slow_reader_holds_no_snapshot(tmp_path, server: Running, client: httpx.Client) -> None:
    sent.send(client, sent.attempts(0, 20_000, 0))
    sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 20_000)
    with client.stream("GET", "/v1/runs/r/export?format=ndjson") as response:
        pieces = response.iter_raw()
        next(pieces)  # and no more for now: the server waits for this reader
        sent.send(client, *(sent.attempts(20_000 + i, 20_001 + i, 1 + i) for i in range(50)))
        engine = sa.create_engine(f"sqlite:///{tmp_path / 'ampwatch.db'}")
        with engine.connect() as connection:
            sent.until(
                lambda: connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[:2] == (0, 0)
            )
        engine.dispose()
        assert sum(piece.count(b"\n") for piece in pieces) > 10_000


def test_an_export_is_a_file(client: httpx.Client) -> None:
    sent.send(client, sent.attempts(0, 3, 0))
    answer = client.get("/v1/runs/r/export?kind=attempts")
    assert answer.headers["content-disposition"] == 'attachment; filename="r-attempts.csv"'
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert client.get("/v1/runs/x/export").status_code == 404
    assert client.get("/v1/runs/r/export?format=xml").json()["field"] == "format"
