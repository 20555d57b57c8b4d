"""docs/rest.md, the routes and the schemas say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sent
from pydantic import TypeAdapter

from ampwatch.records import Event
from ampwatch_server import schemas
from ampwatch_server.serve import running
from ampwatch_server.store.paging import write_cursor

REST = Path(__file__).parents[2] / "docs" / "rest.md"
FIGURES = "/v1/runs/{run}/figures/"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with one run, which the tests here only read."""
    with (
        running(database=str(tmp_path_factory.mktemp("contract") / "a.db")) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}) as client,
    ):
        fill(client)
        yield client


def fill(client: httpx.Client) -> None:
    run = Event("run", 1.0, data={"name": "n", "world_size": 1})
    loss = {"loss": [float("nan")] * 30, "found_inf": [1] * 30, "skipped": [1] * 30}
    sent.send(
        client,
        sent.events(run, *sent.named("a")),
        sent.attempts(0, 30, 1, **loss),
        sent.tensors([0, 25], [0, 0], 2),
    )
    sent.until(lambda: client.get("/v1/runs/r").json()["attempts"] == 30)


def documented() -> set[tuple[str, str]]:
    """Method and path of every row of the table in docs/rest.md."""
    rows = [
        line.split(" | ")[0].strip("| ") for line in REST.read_text().splitlines() if line.startswith("| `")
    ]
    found = set()
    for cell in rows:
        for entry in re.findall(r"`([^`]+)`", cell):
            method, _, path = entry.rpartition(" ")
            path = path.split("?")[0].replace("\\|", "|").replace("{id}", "{tensor}")
            operations = path in ("/metrics", "/healthz", "/readyz")
            found.add((method or "GET", path if operations else f"/v1{path}"))
    return found


def served(client: httpx.Client) -> set[tuple[str, str]]:
    paths = client.get("/openapi.json").json()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_every_endpoint_is_documented_and_there(client: httpx.Client) -> None:
    figures = {("GET", f"{FIGURES}{name}") for name in ("timeline", "heatmap", "histogram")}
    template = {entry for entry in documented() if "figures/{" in entry[1]}
    assert len(template) == 1
    assert documented() - template | figures == served(client)


def test_the_description_says_what_each_endpoint_does_and_how_to_sign_in(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    told = document["paths"]["/v1/runs/{run}/findings"]["get"]
    assert told["summary"] == "The verdict and the findings, the worst first."
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert "HTTPValidationError" not in document["components"]["schemas"]  # every error is a Problem


def test_every_endpoint_has_an_example_that_its_own_schema_allows(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    checked = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = [
                operation.get("requestBody", {}),
                *(operation["responses"][s] for s in operation["responses"] if s < "3"),
            ]
            for media in (media for body in bodies for media in body.get("content", {}).values()):
                if "$ref" in media["schema"]:
                    model = getattr(schemas, media["schema"]["$ref"].rpartition("/")[2])
                    model.model_validate_json(json.dumps(media["example"]), strict=True)
                    checked += 1
                elif path.startswith("/v1") and media["schema"].get("format") != "binary":
                    assert "example" in media, (method, path)
    assert checked >= 25


def test_every_endpoint_below_v1_wants_a_token(client: httpx.Client) -> None:
    for method, path in served(client):
        concrete = path.replace("{run}", "r").replace("{tensor}", "0")
        answer = httpx.request(method, client.base_url.join(concrete))
        assert answer.status_code == (200 if path in ("/healthz", "/readyz") else 401), (method, path)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/runs", schemas.RunPage),
        ("/v1/runs/r", schemas.Run),
        ("/v1/runs/r/series?names=loss,scale&points=2", schemas.Series),
        ("/v1/runs/r/events", schemas.EventPage),
        ("/v1/runs/r/tensors", schemas.TensorPage),
        ("/v1/runs/r/tensors/0/series", schemas.Series),
        ("/v1/runs/r/tensors/0/histograms", schemas.Histograms),
        ("/v1/runs/r/heatmap", schemas.Heatmap),
        ("/v1/runs/r/findings", schemas.Findings),
        ("/v1/compare?runs=r", schemas.Comparison),
        ("/v1/compare/figure?runs=r", schemas.Figure),
        ("/v1/alerts", schemas.AlertPage),
        ("/v1/tokens", schemas.TokenPage),
        ("/v1/audit", schemas.AuditPage),
        ("/v1/runs/r/figures/timeline", schemas.Figure),
        ("/v1/runs/r/figures/heatmap?theme=dark", schemas.Figure),
        ("/v1/runs/r/figures/histogram?tensor=0", schemas.Figure),
    ],
)
def test_answers_are_what_their_schema_says(filled: httpx.Client, path: str, model: Any) -> None:
    answer = filled.get(path)
    assert answer.status_code == 200
    TypeAdapter(model).validate_json(answer.content, strict=True)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/runs/x", (404, None)),
        ("/v1/runs/x/series", (404, None)),
        ("/v1/runs/x/events", (404, None)),
        ("/v1/runs/x/tensors", (404, None)),
        ("/v1/runs/x/tensors/0/series", (404, None)),
        ("/v1/runs/x/tensors/0/histograms", (404, None)),
        ("/v1/runs/x/heatmap", (404, None)),
        ("/v1/runs/x/findings", (404, None)),
        ("/v1/runs/x/figures/timeline", (404, None)),
        ("/v1/runs/x/figures/heatmap", (404, None)),
        ("/v1/runs/x/figures/histogram?tensor=0", (404, None)),
        ("/v1/runs/x/export", (404, None)),
        ("/v1/runs/x/report", (404, None)),
        ("/v1/compare?runs=x", (404, None)),
        ("/v1/runs/r/tensors/77/series", (404, None)),
        ("/v1/runs/r/series?producer=x", (422, "producer")),
        ("/v1/runs?order=age", (422, "order")),
        ("/v1/runs?limit=0", (422, "limit")),
        ("/v1/runs?cursor=x", (422, "cursor")),
        ("/v1/runs?status=dead", (422, "status")),
        ("/v1/runs/r/series?names=", (422, "names")),
        ("/v1/runs/r/series?names=loss&points=0", (422, "points")),
        ("/v1/runs/r/series?names=loss&from=-1", (422, "from")),
        ("/v1/runs/r/events?type=skip,bogus", (422, "type")),
        ("/v1/runs/r/events?type=,", (422, "type")),
        ("/v1/runs/r/heatmap?stat=x", (422, "stat")),
        ("/v1/runs/r/tensors/x/series", (422, "tensor")),
        ("/v1/runs/r/figures/timeline?theme=pink", (422, "theme")),
    ],
)
def test_bad_requests_get_a_problem_that_names_the_field(
    filled: httpx.Client, path: str, expected: tuple
) -> None:
    answer = filled.get(path)
    assert answer.headers["content-type"] == "application/problem+json"
    schemas.Problem.model_validate_json(answer.content)
    assert (answer.status_code, answer.json().get("field")) == expected


def test_patch_and_delete(client: httpx.Client) -> None:
    fill(client)
    edited = client.patch("/v1/runs/r", json={"name": "mine", "tags": ["x"]}).json()
    assert (edited["name"], edited["tags"]) == ("mine", ["x"])
    assert client.patch("/v1/runs/r", json={"nam": "x"}).json()["field"] == "nam"
    assert client.patch("/v1/runs/x", json={"name": "x"}).status_code == 404
    assert client.delete("/v1/runs/r").status_code == 204
    assert client.delete("/v1/runs/r").status_code == 404
    assert client.get("/v1/runs").json() == {"items": [], "next": None}


def test_no_parameter_reaches_a_database_that_would_choke_on_it(database: str, connect) -> None:
    with running(database=database) as server, connect(server) as client:
        sent.send(client, sent.attempts(0, 3))
        expected = {
            "/v1/runs/%00": 404,
            "/v1/runs/%F0%9F%A6%8A": 404,
            "/v1/live?run=%00": 404,
            "/v1/runs?q=%00": 200,
            "/v1/runs?project=%00": 200,
            "/v1/runs/r/events?type=%00": 422,
            "/v1/runs/r/events?from=99999999999999999999": 422,
            "/v1/runs/r/series?names=loss&to=99999999999999999999": 422,
            "/v1/runs/r/series?names=loss&to=9223372036854775807": 200,
            "/v1/runs/r/series?names=loss&rank=99999999999": 422,
            "/v1/runs/r/events?cursor=" + write_cursor((1.0, 2**63)): 422,
            "/v1/runs?order=name&cursor=" + write_cursor(("\x00", "r")): 422,
        }
        assert {path: client.get(path).status_code for path in expected} == expected
