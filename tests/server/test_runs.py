from __future__ import annotations

import math

import httpx
import pytest
import sent
import sqlalchemy as sa

from ampwatch.errors import InvalidBatch, RunNotFound
from ampwatch.records import Batch, Event
from ampwatch_server import tables as t
from ampwatch_server.service import Service
from ampwatch_server.store import runs


def described(
    name: str, *, run: str, producer: str, project: str = "p", tags: tuple[str, ...] = ()
) -> sent.Batch:
    data = {"project": project, "name": name, "tags": list(tags), "world_size": 1, "config": {"lr": math.inf}}
    return sent.events(Event("run", 1.0, data=data), run=run, producer=producer)


def three(service: Service, clock: list[float]) -> None:
    for i, name in enumerate(("bert", "resnet", "vit")):
        clock[0] += 1
        tags = ("fp16", "100%") if name == "vit" else ()
        sent.store(
            service, described(name, run=name[0], producer=str(i) * 32, project=f"p{i % 2}", tags=tags)
        )


def listed(service: Service, **given: object) -> dict[str, object]:
    chosen = (
        dict.fromkeys(("project", "status", "q", "cursor")) | {"order": "-last_seen", "limit": 10} | given
    )
    with service.database.read() as connection:
        return runs.list_runs(connection, service.settings, **chosen)


def names(service: Service, **given: object) -> list[str]:
    return [run["name"] for run in listed(service, **given)["items"]]


def run(service: Service) -> dict[str, object]:
    with service.database.read() as connection:
        return runs.get_run(connection, service.settings, "r")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("-last_seen", ["vit", "resnet", "bert"]),
        ("started", ["bert", "resnet", "vit"]),
        ("name", ["bert", "resnet", "vit"]),
    ],
)
def test_lists_page_by_page_in_order(
    service: Service, clock: list[float], order: str, expected: list[str]
) -> None:
    three(service, clock)
    first = listed(service, order=order, limit=2)
    rest = listed(service, order=order, limit=2, cursor=first["next"])
    assert [r["name"] for r in first["items"] + rest["items"]] == expected
    assert rest["next"] is None


@pytest.mark.parametrize(
    ("told", "started"),
    [(999_000.0, 999_000.0), (2e9, 1_000_000.0), (-1.0, 1_000_000.0), (math.nan, 1_000_000.0)],
)
def test_a_run_began_when_it_says_but_not_after_its_first_record(
    service: Service, told: float, started: float
) -> None:
    sent.store(service, sent.events(Event("run", told)))
    assert run(service)["started"] == started


def test_lists_can_be_filtered(service: Service, clock: list[float]) -> None:
    three(service, clock)
    assert names(service, project="p0") == ["vit", "bert"]
    assert names(service, q="RES") == ["resnet"]
    assert names(service, q="fp16") == ["vit"]
    assert names(service, q="%") == ["vit"]
    assert names(service, status="finished") == []
    assert listed(service, q="zzz") == {"items": [], "next": None}


@pytest.mark.parametrize("cursor", ["x", "gqFhoWI", "!!", "wA", "é"])
def test_a_cursor_that_is_none_is_refused(service: Service, cursor: str) -> None:
    with pytest.raises(InvalidBatch, match="cursor: it must be the `next` of an earlier answer"):
        listed(service, cursor=cursor)


def test_status_by_the_servers_clock(service: Service, clock: list[float]) -> None:
    def status() -> object:
        return run(service)["status"]

    sent.store(service, sent.attempts(0, 5, 0))
    assert status() == "live"
    clock[0] += 181
    assert status() == "crashed"
    clock[0] += 600
    sent.store(service, sent.events(Event("heartbeat", 1.0), seq=1))
    assert status() == "stalled"
    sent.store(service, sent.events(Event("finish", 1.0), seq=2))
    assert status() == "finished"


def test_a_run_of_slow_attempts_is_stalled_after_20_of_them(service: Service, clock: list[float]) -> None:
    def after(seconds: float, *batches: Batch) -> object:
        clock[0] += seconds
        sent.store(service, *batches)
        return run(service)["status"]

    sent.store(service, sent.events(Event("run", 1.0)))
    slow = sent.attempts(0, 5, 1, time=[0.0, 40.0, 80.0, 900.0, 940.0])  # one of them over a long evaluation
    assert after(200, slow) == "live"
    assert [after(100, sent.events(Event("heartbeat", 1.0), seq=seq)) for seq in range(2, 10)] == ["live"] * 8
    assert after(1, sent.events(Event("heartbeat", 1.0), seq=10)) == "stalled"


def test_a_restart_makes_a_finished_run_live_again(service: Service, clock: list[float]) -> None:
    sent.store(service, sent.events(Event("finish", 1.0)))
    clock[0] += 10
    sent.store(
        service, sent.attempts(0, 5, producer=sent.Q), sent.events(Event("run", 1.0), producer=sent.Q, seq=1)
    )
    assert run(service)["status"] == "live"


def test_the_summary_of_a_run(service: Service) -> None:
    found_inf = [0, 0, 1, 0]
    last = {
        "loss": [4.0, math.nan, math.inf, 1.0],
        "scale": [8.0, 8.0, 8.0, 4.0],
        "scale_after": [8.0, 8.0, 4.0, 4.0],
    }
    sent.store(
        service, described("n", run="r", producer=sent.P), sent.attempts(0, 4, 1, found_inf=found_inf, **last)
    )
    found = run(service)
    counts = {
        name: found[name] for name in ("attempts", "taken", "skipped", "step", "scale", "loss", "world_size")
    }
    expected = {
        "attempts": 4,
        "taken": 3,
        "skipped": 1,
        "step": 4,
        "scale": 4.0,
        "loss": 1.0,
        "world_size": 1,
    }
    assert counts == expected
    assert found["sparkline"] == {"loss": [4.0, "NaN", "NaN", 1.0], "scale_log2": [3.0, 3.0, 3.0, 2.0]}
    assert found["config"] == {"lr": "Infinity"}


def test_edits_outlive_the_runs_own_description(service: Service) -> None:
    sent.store(service, described("given", run="r", producer=sent.P, tags=("a",)))
    service.database.write(
        lambda c: runs.edit_run(c, "r", {"name": "mine", "notes": "n\x00", "archived": True})
    )
    sent.store(service, described("again", run="r", producer=sent.Q, tags=("b",)))
    found = run(service)
    assert (found["name"], found["tags"], found["archived"]) == ("mine", ["a"], True)
    with pytest.raises(RunNotFound, match="run 'x' is not stored here"):
        service.database.write(lambda c: runs.edit_run(c, "x", {}))


def test_of_a_deleted_run_nobody_is_told_that_it_is_missing(client: httpx.Client) -> None:
    told = [sent.post(client, sent.attempts(i, i + 1, seq=i)).json()["last_seq"] for i in range(3)]
    assert client.delete("/v1/runs/r").status_code == 204
    told += [sent.post(client, sent.attempts(i, i + 1, seq=i)).json()["last_seq"] for i in (3, 4)]
    assert told == [-1, 0, 1, None, 3]


def test_nothing_of_a_deleted_run_is_left(service: Service) -> None:
    sent.store(
        service,
        sent.events(*sent.named("a"), Event("run", 1.0)),
        sent.attempts(0, 3000, 1),
        sent.tensors([0], [0], 2),
    )
    service.database.write(lambda c: runs.delete_run(c, "r"))
    with service.database.read() as connection:
        left = {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar()
            for table in t.metadata.sorted_tables
            if table is not t.formats
        }
    assert not any(left.values()), left
    service.compactor.process("r")  # nothing to do, and nothing comes back
    with pytest.raises(RunNotFound):
        run(service)


def test_optimizers_and_scalers_are_those_of_the_first_ranks_last_producer(service: Service) -> None:
    first = Event("optimizers", 1.0, data={"optimizers": [{"id": 0, "lr": [0.1]}, {"id": 1, "lr": [0.2]}]})
    changed = Event("optimizers", 2.0, data={"optimizers": [{"id": 1, "lr": [math.nan]}]})
    sent.store(service, sent.events(Event("scaler", 1.0, data={"scaler": 0}), first, changed))
    found = run(service)
    assert found["optimizers"] == [{"id": 0, "lr": [0.1]}, {"id": 1, "lr": ["NaN"]}]
    assert found["scalers"] == [{"scaler": 0}]


@pytest.mark.parametrize(
    "event",
    [
        Event("tensors", 1.0, data={"tensors": "no list"}),
        Event("tensors", 1.0, data={"tensors": [None, {"id": -1}, {"id": True}, {"id": "0"}]}),
        Event("origin", 1.0, data={"origins": {"x": 1, "-1": 2, "99999999999": 3}}),
        Event("run", 1.0, data={"name": None, "tags": {"a": 1}, "host": [1]}),
        Event("optimizers", 1.0, data={"optimizers": [None, 3]}),
        Event("optimizers", 1.0, data={"optimizers": None}),
    ],
)
def test_an_event_with_strange_data_breaks_nothing(service: Service, event: Event) -> None:
    sent.store(service, sent.events(event))
    assert run(service)["run"] == "r"


def test_a_run_is_finished_once_nothing_is_missing_or_after_a_while(
    service: Service, clock: list[float]
) -> None:
    sent.store(service, sent.events(Event("finish", 1.0), seq=1))
    assert run(service)["status"] == "live"
    clock[0] += 31
    assert run(service)["status"] == "finished"
    sent.store(service, sent.attempts(0, 5, 0))
    assert (run(service)["status"], run(service)["attempts"]) == ("finished", 5)


def test_an_end_that_overtakes_its_attempts_finishes_nothing(service: Service) -> None:
    sent.store(service, sent.events(Event("finish", 1.0, data={"attempts": 5})), sent.attempts(0, 3, 1))
    assert run(service)["status"] == "live"
    sent.store(service, sent.attempts(3, 5, 2))
    assert run(service)["status"] == "finished"
