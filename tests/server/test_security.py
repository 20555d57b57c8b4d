from __future__ import annotations

import httpx
import pytest

from ampwatch_server.security import allowed_hosts
from ampwatch_server.serve import Running
from ampwatch_server.settings import Settings


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("10.0.0.7", 200),
        ("evil.example", 421),
        ("", 421),
    ],
)
def test_only_names_of_this_server_are_answered(server: Running, host: str, status: int) -> None:
    assert httpx.get(f"{server.url}/healthz", headers={"Host": host}).status_code == status


def test_names_can_be_allowed() -> None:
    hosts = allowed_hosts(Settings(database="x", host="0.0.0.0", allowed_hosts=("Amp.Example",)))
    assert {"amp.example", "localhost"} < hosts
    assert allowed_hosts(Settings(database="x")) == {"localhost", "127.0.0.1"}


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 403), ("null", 403), (None, 404), ("own", 404)]
)
def test_writes_from_another_origin_are_refused(
    client: httpx.Client, origin: str | None, status: int
) -> None:
    own = str(client.base_url).rstrip("/")
    headers = {} if origin is None else {"Origin": own if origin == "own" else origin}
    assert client.delete("/v1/runs/x", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path", ["/", "/v1/runs", "/static/base.css", "/assets/plotly.min.js", "/nope", "/docs"]
)
def test_every_answer_carries_the_guards(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


def test_a_path_that_no_database_could_store_is_not_found(client: httpx.Client) -> None:
    answer = client.get("/v1/runs/%00")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
