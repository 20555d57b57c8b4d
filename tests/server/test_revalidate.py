from __future__ import annotations

import httpx
import pytest
import sent

from ampwatch.records import Event

PATHS = (
    "",
    "/series?names=loss",
    "/events",
    "/findings",
    "/tensors",
    "/heatmap",
    "/figures/timeline",
    "/recommendations",
)


@pytest.fixture
def finished(client: httpx.Client) -> httpx.Client:
    sent.send(client, sent.attempts(0, 3), sent.events(Event("finish", 1.0, data={"attempts": 3}), seq=1))
    sent.until(lambda: client.get("/v1/runs/r").json().get("status") == "finished")
    return client


def test_of_a_finished_run_nothing_is_sent_twice(finished: httpx.Client) -> None:
    def asked_twice(path: str) -> tuple[httpx.Response, httpx.Response] | None:
        """Both answers; None where a pass over what came last made the run anew between them."""
        first = finished.get(f"/v1/runs/r{path}")
        again = finished.get(f"/v1/runs/r{path}", headers={"If-None-Match": f'"x", {first.headers["etag"]}'})
        return (first, again) if again.headers["etag"] == first.headers["etag"] else None

    for path in PATHS:
        first, again = sent.until(lambda path=path: asked_twice(path))
        assert first.headers["cache-control"] == "private, no-cache"
        assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


def test_an_edit_makes_what_is_cached_old(finished: httpx.Client) -> None:
    tag = {"If-None-Match": finished.get("/v1/runs/r").headers["etag"]}
    finished.patch("/v1/runs/r", json={"notes": "n"})
    assert finished.get("/v1/runs/r", headers=tag).json()["notes"] == "n"


def test_a_run_that_grows_has_no_tag_and_a_tag_lets_nobody_in(finished: httpx.Client) -> None:
    tag = {"If-None-Match": finished.get("/v1/runs/r").headers["etag"]}
    assert httpx.get(finished.base_url.join("/v1/runs/r"), headers=tag).status_code == 401
    sent.send(
        finished, sent.attempts(0, 3, producer=sent.Q), sent.events(Event("run", 1.0), producer=sent.Q, seq=1)
    )
    sent.until(lambda: finished.get("/v1/runs/r").json()["status"] == "live")
    assert "etag" not in finished.get("/v1/runs/r", headers=tag).headers
