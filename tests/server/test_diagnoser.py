from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import pytest
import sent

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.diagnosis.samples import SAMPLE, kept_bytes, kept_of
from ampwatch.records import Batch, Event
from ampwatch_server.diagnoser import ENGINE_BYTES, WINDOW, Diagnoser, RunDiagnosis, stored_batches, windowed
from ampwatch_server.fold import fold
from ampwatch_server.serve import running
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings
from ampwatch_server.store.findings import findings_of


def overflowing(**header: str) -> list[Batch]:
    """Twelve attempts whose loss is NaN: nothing is ever learned."""
    n = 12
    scale = [65536.0 / 2**i for i in range(n)]
    columns = {"loss": [math.nan] * n, "found_inf": [1] * n, "skipped": [1] * n, "scale": scale}
    described = sent.events(Event("run", 1.0, data={"name": "x"}), **header)
    return [described, sent.attempts(0, n, 1, **columns, **header)]


def found(service: Service) -> dict[str, object]:
    with service.database.read() as connection:
        return findings_of(connection, "r")


def test_findings_are_those_of_the_engine(service: Service) -> None:
    sent.store(service, *overflowing())
    engine = Diagnosis.from_batches(overflowing())
    answer = found(service)
    assert answer["verdict"] == engine.verdict().as_dict()
    assert [f["key"] for f in answer["findings"]] == [f.key for f in engine.findings()]
    assert answer["verdict"]["word"] == "failing"


def test_a_server_that_takes_over_comes_to_the_same_findings(service: Service, clock: list[float]) -> None:
    sent.store(service, *overflowing(), sent.attempts(12, 1500, 2))
    clock[0] += service.settings.lease_s + 1
    other = Service(service.settings, Diagnosis)
    last = [sent.attempts(1500, 1600, 3), sent.tensors([0, 25], [0, 0], 4)]
    sent.store(other, *last)
    engine = Diagnosis.from_batches([*overflowing(), sent.attempts(12, 1500, 2), *last])
    assert found(other)["verdict"] == engine.verdict().as_dict()
    assert [f["key"] for f in found(other)["findings"]] == [f.key for f in engine.findings()]
    other.database.close()


def test_what_lies_in_chunks_is_given_back_as_it_was_sent(service: Service) -> None:
    batches = [
        sent.attempts(0, 1024, 0),
        sent.tensors([0, 25], [0, 0], 1),
        sent.events(Event("finish", 1.0), seq=2),
    ]
    sent.store(service, *batches)
    with service.database.read() as connection:
        back = {batch.kind: batch for batch in stored_batches(connection, "r")}
    assert back["events"].events() == batches[2].events()
    for batch in batches[:2]:
        columns = {name: column.tolist() for name, column in batch.table().items()}
        given = {name: column.tolist() for name, column in back[batch.kind].table().items()}
        assert {name: given[name] for name in columns} == columns


@pytest.mark.parametrize("count", [1, 32, 1000, 4000])
def test_what_an_engine_keeps_of_tensors_is_about_known(count: int) -> None:
    kept = len(kept_of(set(range(0, 25 * count, 25))))
    assert kept_bytes(count, 3 * count) == pytest.approx(3 * kept * SAMPLE.itemsize, rel=0.1)


def test_engines_are_kept_of_the_runs_that_grew_last_as_far_as_there_is_room(service: Service) -> None:
    diagnoser = Diagnoser(sent.NoDiagnosis, most_bytes=3 * ENGINE_BYTES)
    with service.database.read() as connection:
        for run in "abcd":
            diagnoser.of(connection, run)
        assert [diagnoser.has(run) for run in "abcd"] == [False, True, True, True]
        diagnoser.of(connection, "b").add({(1, 0): sent.attempts(0, 10_000, run="b")})
        diagnoser.of(connection, "b")
        assert [diagnoser.has(run) for run in "abcd"] == [False, True, False, False]
        diagnoser.forget("b")
        assert diagnoser.of(connection, "a").size == ENGINE_BYTES


class Recording(sent.NoDiagnosis):
    """Keeps the attempts it is given, in order."""

    def __init__(self) -> None:
        self.attempts: list[int] = []

    def add(self, batch: Batch) -> None:
        self.attempts += batch.table()["attempt"].tolist()


def test_of_tensors_what_a_diagnosis_keeps_is_given_back(service: Service) -> None:
    sampled = list(range(0, 50_000, 25))
    sent.store(
        service,
        sent.attempts(0, 50_000),
        sent.tensors(sampled, [0] * 2000, 1),
        sent.events(Event("finish", 1.0), seq=2),
    )
    with service.database.read() as connection:
        batches = [batch for batch in stored_batches(connection, "r") if batch.kind == "tensors"]
    given = [attempt for batch in batches for attempt in batch.table()["attempt"].tolist()]
    assert set(given) == kept_of(set(sampled))
    assert len(given) < 300


def test_what_comes_between_diagnosis_and_folding_is_diagnosed_before_it_is_folded(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recording()
    service = Service(Settings(database=database, clock=lambda: 1e6), lambda: engine)
    late = [sent.attempts(1030, 2040, 1), sent.attempts(2040, 2100, 2)]

    def fold_late(*given: Any) -> dict[int, int]:
        sent.store(service, *late, fold=False)
        return fold(*given)

    monkeypatch.setattr("ampwatch_server.compactor.fold", fold_late)
    sent.store(service, sent.attempts(0, 1030, 0))
    service.compactor.process("r")
    assert engine.attempts == list(range(2100))
    assert sorted(place[-1] for place in sent.all_chunks(service)) == [0, 1024]
    service.database.close()


class Broken(sent.NoDiagnosis):
    def add(self, batch: Batch) -> None:
        raise ValueError("a bug in the engine")


def test_a_bug_in_the_engine_stops_nothing_else(
    database: str, connect, caplog: pytest.LogCaptureFixture
) -> None:
    with running(database=database, engine=Broken) as server, connect(server) as client:
        sent.send(client, sent.attempts(0, 3, 0))
        sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 3)
        sent.send(client, sent.attempts(3, 5, 1))
        sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 5)
        verdict = client.get("/v1/runs/r/findings").json()["verdict"]
    assert verdict["word"] == "no data"
    assert verdict["sentence"].startswith("The diagnosis failed on these records")
    assert [r.levelno for r in caplog.records if "diagnosis of a run failed" in r.message] == [logging.ERROR]


def test_a_finding_is_visible_within_two_seconds(tmp_path: Path, connect) -> None:
    with running(database=str(tmp_path / "a.db")) as server, connect(server) as client:
        sent.send(client, *overflowing())
        sent_at = time.monotonic()
        sent.until(lambda: client.get("/v1/runs/r/findings").json()["verdict"]["word"] == "failing")
        assert time.monotonic() - sent_at < 2


def test_what_an_engine_of_a_server_holds_does_not_grow_with_the_run() -> None:
    diagnosis = RunDiagnosis(windowed(), [])
    diagnosis.add({(1, 0): sent.attempts(0, 2 * WINDOW, 0)})
    held = diagnosis.size
    diagnosis.add({(1, 1): sent.attempts(2 * WINDOW, 3 * WINDOW, 1)})
    assert (held, diagnosis.size) == (ENGINE_BYTES + 165 * 2 * WINDOW,) * 2
