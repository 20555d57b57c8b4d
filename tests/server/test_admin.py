"""Tokens and the audit by REST."""

from __future__ import annotations

import httpx
import pytest
import sent

from ampwatch_server.serve import Running


def test_a_token_is_made_used_listed_and_revoked(client: httpx.Client, server: Running) -> None:
    made = client.post("/v1/tokens", json={"name": " cluster", "scopes": ["write"]})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    bearer = {"Authorization": f"Bearer {made.json()['token']}"}
    with httpx.Client(base_url=server.url, headers=bearer) as job:
        sent.send(job, sent.attempts(0, 3))
        assert job.get("/v1/runs").status_code == 403
        listed = sent.until(
            lambda: [r for r in client.get("/v1/tokens").json()["items"] if r["last_used"]][-1:]
        )
        assert (listed[0]["name"], listed[0]["scopes"]) == ("cluster", ["write"])
        assert client.delete(f"/v1/tokens/{listed[0]['id']}").status_code == 204
        assert sent.post(job, sent.attempts(3, 4, 1)).status_code == 401
    assert client.delete(f"/v1/tokens/{listed[0]['id']}").status_code == 404


def test_use_is_written_down_once_a_day_for_each_address(client: httpx.Client) -> None:
    for _ in range(3):
        client.get("/v1/runs")
    used = sent.until(lambda: [e for e in client.get("/v1/audit").json()["items"] if e["action"] == "use"])
    assert [(entry["who"], entry["subject"]) for entry in used] == [("token this process 1", "127.0.0.1")]


def test_lists_page(client: httpx.Client) -> None:
    for name in ("a", "b", "c"):
        client.post("/v1/tokens", json={"name": name, "scopes": ["read"]})
    for path, count in (("/v1/tokens", 4), ("/v1/audit", 4)):
        found, cursor = [], ""
        while cursor is not None:
            page = client.get(path, params={"limit": 3, "cursor": cursor}).json()
            found += page["items"]
            cursor = page["next"]
        assert len({row["id"] for row in found}) == len(found) >= count


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": " ", "scopes": ["read"]}, "name"),
        ({"name": "a", "scopes": []}, "scopes"),
        ({"name": "a", "scopes": ["root"]}, "scopes.0"),
    ],
)
def test_a_token_that_cannot_be_made_says_why(client: httpx.Client, given: object, field: str) -> None:
    answer = client.post("/v1/tokens", json=given)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_only_administrators_see_and_do_this(client: httpx.Client, server: Running) -> None:
    value = client.post("/v1/tokens", json={"name": "a", "scopes": ["read", "write"]}).json()["token"]
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {value}"}) as reader:
        asked = [reader.get(f"/v1/{name}").status_code for name in ("tokens", "audit", "alerts")]
        asked.append(reader.post("/v1/tokens", json={"name": "a", "scopes": ["admin"]}).status_code)
        asked.append(reader.post("/v1/alerts/a/test").status_code)
        asked.append(reader.patch("/v1/runs/r/findings/k", json={"mark": None}).status_code)
    assert asked == [403] * 6
