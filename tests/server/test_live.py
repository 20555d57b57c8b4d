from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sent

from ampwatch.records import Event
from ampwatch_server.live import SKEW_S, is_news
from ampwatch_server.serve import running
from ampwatch_server.service import CALM_S, SOON_S, WATCH_S, Service, _note_watches
from ampwatch_server.settings import Settings
from ampwatch_server.store.runs import news_now


def events(response: httpx.Response) -> Iterator[dict[str, object]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_watcher_is_told_what_is_and_what_changes(client: httpx.Client) -> None:
    sent.send(client, sent.attempts(0, 3, 0))
    sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 3)
    with client.stream("GET", "/v1/live?run=r") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = events(response)
        assert next(told)["attempts"] == 3
        sent.send(client, sent.attempts(3, 5, 1))
        state = next(state for state in told if state["attempts"] == 5)
    assert state["cursor"] == {sent.P: 1}
    assert (state["run"], state["scale"], state["status"]) == ("r", 65536.0, "live")
    assert state["verdict"]["word"] == "healthy"


def test_a_watcher_of_one_run_hears_of_no_other(client: httpx.Client) -> None:
    sent.send(client, sent.attempts(0, 3, 0))
    with client.stream("GET", "/v1/live?run=r") as response:
        told = events(response)
        next(told)
        sent.send(client, sent.attempts(0, 3, 0, run="other", producer=sent.Q), sent.attempts(3, 5, 1))
        assert next(state for state in told if state["attempts"] == 5)["run"] == "r"


@pytest.mark.parametrize("path", ["/v1/live?run=r", "/v1/live"])
def test_clients_come_soon_to_every_server_while_one_shows_their_run(
    database: str, connect, path: str
) -> None:
    other = Service(Settings(database), sent.NoDiagnosis)
    with running(database=database) as server, connect(server) as client:
        sent.send(client, sent.events(Event("run", 1.0)), sent.attempts(0, 3, 1))
        sent.until(lambda: client.get("/v1/runs/r").json().get("started") == 1.0)
        assert other.look_up_wait_s("r") >= 10.0
        with client.stream("GET", path):
            assert sent.until(lambda: other.look_up_wait_s("r") == 1.0)
    other.database.close()


def test_a_stream_ends_with_the_token_that_opened_it(client: httpx.Client) -> None:
    made = client.post("/v1/tokens", json={"name": "short", "scopes": ["read"]}).json()
    (mine,) = (token["id"] for token in client.get("/v1/tokens").json()["items"] if token["name"] == "short")
    sent.send(client, sent.attempts(0, 3, 0))
    sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 3)
    bearer = {"Authorization": f"Bearer {made['token']}"}
    with client.stream("GET", "/v1/live", headers=bearer) as response:
        told = events(response)
        assert next(told)["attempts"] == 3
        client.delete(f"/v1/tokens/{mine}")
        sent.send(client, sent.attempts(3, 5, 1))
        assert list(told) == []


def test_who_may_see_one_project_is_told_first_of_its_runs_however_many_others_there_are(
    service: Service, clock: list[float]
) -> None:
    for run, producer, project in (("r", sent.P, "vision"), ("other", sent.Q, "language")):
        told = Event("run", 1.0, data={"project": project})
        sent.store(service, sent.events(told, run=run, producer=producer))
        clock[0] += 1
    with service.database.read() as connection:
        found, _ = news_now(connection, service.settings, None, 1, only="vision")
    assert [state["run"] for _, state in found] == ["r"]


def test_a_watch_is_believed_by_servers_whose_clocks_are_behind_and_ends_by_their_own(
    service: Service, clock: list[float]
) -> None:
    sent.store(service, sent.events(Event("run", 1.0)), sent.attempts(0, 3, 1))
    ahead = clock[0] + SKEW_S - 1
    for run in ("r", "other"):  # the second does not end the first
        rows = [{"run": run, "until": ahead + WATCH_S}]
        service.database.write(lambda connection, rows=rows: _note_watches(connection, rows, clock[0]))
    assert service.look_up_wait_s("r") == SOON_S
    clock[0] += WATCH_S + 2 * SKEW_S
    assert service.look_up_wait_s("r") >= CALM_S[0]


def test_a_cursor_leaves_out_what_was_seen(client: httpx.Client) -> None:
    sent.send(client, sent.attempts(0, 3, 0))
    sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 3)
    seen = json.dumps({sent.P: 0})
    for given in ({"params": {"cursor": seen}}, {"headers": {"Last-Event-ID": seen}}):
        with client.stream("GET", "/v1/live", **given) as response:
            sent.send(client, sent.attempts(3, 5, 1))
            assert next(s for s in events(response) if s["attempts"] == 5)["cursor"] == {sent.P: 1}
        client.delete("/v1/runs/r")
        sent.send(client, sent.attempts(0, 3, 0))
        sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 3)


def test_a_clock_that_is_set_back_hides_no_news(tmp_path: Path, connect) -> None:
    ahead = [0.0]
    with (
        running(database=str(tmp_path / "a.db"), clock=lambda: time.time() + ahead[0]) as server,
        connect(server) as client,
    ):
        sent.send(client, sent.attempts(0, 3, 0))
        with client.stream("GET", "/v1/live?run=r") as response:
            told = events(response)
            while next(told)["attempts"] != 3:
                pass
            ahead[0] = -7200.0
            sent.send(client, sent.attempts(3, 4, 1))
            assert next(told)["attempts"] == 4


def test_a_stream_goes_on_at_another_server(database: str, connect) -> None:
    with (
        running(database=database) as first,
        running(database=database) as second,
        connect(first) as here,
        connect(second) as there,
    ):
        sent.send(here, sent.attempts(0, 3, 0), sent.attempts(0, 3, 0, run="other", producer=sent.Q))
        sent.until(lambda: here.get("/v1/runs/r").json()["attempts"] == 3)
        with here.stream("GET", "/v1/live") as response:
            told = events(response)
            seen = {producer: seq for _ in range(2) for producer, seq in next(told)["cursor"].items()}
        sent.send(here, sent.attempts(3, 5, 1))
        with there.stream("GET", "/v1/live", headers={"Last-Event-ID": json.dumps(seen)}) as response:
            state = next(state for state in events(response) if state["attempts"] == 5)
    assert (state["run"], state["cursor"]) == ("r", {sent.P: 1})


def test_is_news() -> None:
    state = {"cursor": {"a": 3, "b": 1}, "status": "live"}
    assert is_news(state, {})
    assert is_news(state, {"a": 3})
    assert not is_news(state, {"a": 3, "b": 5, "c": 0})


def test_bad_requests_are_answered_before_the_stream_begins(client: httpx.Client) -> None:
    assert client.get("/v1/live?run=x").status_code == 404
    answer = client.get("/v1/live?cursor=[1]")
    assert (answer.status_code, answer.json()["field"]) == (422, "cursor")


def test_an_open_stream_does_not_hold_the_server(tmp_path: Path, connect) -> None:
    with running(database=str(tmp_path / "a.db")) as server:
        client = connect(server)
        response = client.send(client.build_request("GET", "/v1/live"), stream=True)
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        stopped = time.monotonic()
    assert time.monotonic() - stopped < 3
    assert list(lines) == [""]
    response.close()
    client.close()


def test_batches_come_often_while_someone_watches(tmp_path: Path, connect) -> None:
    ahead = [0.0]
    with (
        running(database=str(tmp_path / "a.db"), clock=lambda: time.time() + ahead[0]) as server,
        connect(server) as client,
    ):
        sent.send(client, sent.attempts(0, 3, 0))
        ahead[0] = 999.0
        assert sent.post(client, sent.attempts(3, 4, 1)).json()["next_batch_s"] >= 10
        with client.stream("GET", "/v1/live?run=r") as response:
            told = events(response)
            next(told)
            assert sent.post(client, sent.attempts(4, 5, 2)).json()["next_batch_s"] == 1.0


def test_a_run_that_falls_silent_is_told_by_the_passing_of_time(tmp_path: Path, connect) -> None:
    ahead = [0.0]
    with (
        running(database=str(tmp_path / "a.db"), clock=lambda: time.time() + ahead[0]) as server,
        connect(server) as client,
    ):
        sent.send(client, sent.attempts(0, 3, 0))
        with client.stream("GET", "/v1/live?run=r") as response:
            told = events(response)
            while next(told)["attempts"] != 3:
                pass
            ahead[0] = 185.0
            assert next(told)["status"] == "crashed"
            sent.send(client, sent.events(Event("heartbeat", 1.0), seq=1))
            assert next(told)["status"] == "live"
            ahead[0] = 605.0
            sent.send(client, sent.events(Event("heartbeat", 1.0), seq=2))
            assert next(told)["status"] == "stalled"
        seen = {"Last-Event-ID": json.dumps({sent.P: 2})}
        with client.stream("GET", "/v1/live", headers=seen) as response:
            assert next(events(response))["status"] == "stalled"
