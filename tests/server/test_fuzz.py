"""Whatever is asked by the letter of the OpenAPI document, the answer is never an error of the server's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import schemathesis
import sent
from hypothesis import given, settings
from schemathesis.checks import not_a_server_error

from ampwatch.records import Event
from ampwatch_server.serve import Running, running

EXAMPLES = int(
    os.environ.get("AMPWATCH_REQUESTS", "12")
)  # of each operation; `make soak` asks for others each time


@contextmanager
def filled_server(folder: Path) -> Iterator[Running]:
    """A server with a run to ask for."""
    with running(database=str(folder / "a.db")) as server, client_of(server) as client:
        loss = {"loss": [float("nan")] * 30, "found_inf": [1] * 30, "skipped": [1] * 30}
        events = sent.events(Event("run", 1.0, data={"name": "n"}), *sent.named("a"))
        sent.send(client, events, sent.attempts(0, 30, 1, **loss), sent.tensors([0, 25], [0, 0], 2))
        sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 30)
        yield server


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with filled_server(tmp_path_factory.mktemp("fuzz")) as server:
        yield server


def client_of(server: Running) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}, timeout=60)


def test_no_request_is_an_error_of_the_servers(tmp_path: Path) -> None:
    with filled_server(tmp_path) as server, client_of(server) as client:
        document = client.get("/openapi.json").json()
        del document["paths"]["/v1/live"]  # an event stream has no end
        found = [each.ok() for each in schemathesis.openapi.from_dict(document).get_all_operations()]
        assert len(found) >= 25
        for operation in sorted(
            found, key=lambda operation: operation.method == "delete"
        ):  # and these at last
            ask(operation, server)


def ask(operation: schemathesis.APIOperation, server: Running) -> None:
    @settings(max_examples=EXAMPLES, derandomize="AMPWATCH_REQUESTS" not in os.environ, database=None)
    @given(operation.as_strategy())
    def asked(case: schemathesis.Case) -> None:
        if case.method == "GET" and "run" in (case.path_parameters or {}):
            case.path_parameters["run"] = "r"  # else nearly all are of a run that there is not
        response = case.call(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"})
        case.validate_response(response, checks=[not_a_server_error])

    asked()


@pytest.mark.parametrize(
    "body", [b'{"notes": NaN}', b'{"name": Infinity}', b'{"tags": ["\xff"]}', b"\xff\xfe", b"{"]
)
def test_a_body_that_is_no_json_is_refused(filled: Running, body: bytes) -> None:
    with client_of(filled) as client:
        answer = client.patch("/v1/runs/r", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "1e400", "%FF", "%00", "9" * 5000])
def test_a_number_that_is_none_is_refused(filled: Running, value: str) -> None:
    paths = (
        "series?from=",
        "series?points=",
        "heatmap?columns=",
        "events?limit=",
        "export?to=",
        "figures/timeline?rank=",
    )
    with client_of(filled) as client:
        assert {client.get(f"/v1/runs/r/{path}{value}").status_code for path in paths} == {422}


def test_a_hundred_thousand_tensors(tmp_path, connect) -> None:
    n = 100_000
    engine = {"database": str(tmp_path / "a.db"), "engine": sent.NoDiagnosis}
    with running(**engine) as server, client_of(server) as client:
        names = [f"blocks.{i}.weight" for i in range(n)]
        sent.send(
            client, sent.events(*sent.named(*names)), sent.tensors([0] * 2000, list(range(n - 2000, n)), 1)
        )
        sent.until(lambda: client.get("/v1/runs/r/tensors?limit=1").json()["items"], 60)
        page = client.get("/v1/runs/r/tensors?limit=1000").json()
        assert [len(page["items"]), page["items"][999]["name"]] == [1000, "blocks.999.weight"]
        assert len(client.get("/v1/runs/r/heatmap?stat=norm&rows=40").json()["tensors"]) == 40
        figure = client.get("/v1/runs/r/figures/heatmap?stat=norm&rows=40")
        assert len(json.loads(figure.content)["data"][0]["y"]) == 40
