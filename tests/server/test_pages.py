from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import sent

from ampwatch_server.serve import Running, running


@pytest.mark.parametrize("path", ["/", "/run/any", "/compare", "/settings", "/docs"])
def test_every_file_a_page_asks_for_is_there_and_relative(
    server: Running, client: httpx.Client, path: str
) -> None:
    page = client.get(path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    asked = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert asked
    for reference in asked:
        assert not reference.startswith(("/", "http"))
        assert client.get(httpx.URL(f"{server.url}{path}").join(reference)).status_code == 200


def test_assets_are_kept_and_not_sent_twice(client: httpx.Client) -> None:
    first = client.get("/assets/plotly.min.js")
    assert first.headers["cache-control"] == "max-age=86400"
    again = client.get("/assets/plotly.min.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/assets/passwd").status_code == 404


def test_static_files_are_asked_for_again(client: httpx.Client) -> None:
    first = client.get("/static/base.css")
    assert first.headers["cache-control"] == "no-cache"
    assert client.get("/static/base.css", headers={"If-None-Match": first.headers["etag"]}).status_code == 304


def test_health_needs_no_token_and_metrics_do(client: httpx.Client) -> None:
    base = str(client.base_url)
    assert httpx.get(f"{base}/healthz").text == "ok\n"
    assert httpx.get(f"{base}/readyz").text == "ok\n"
    assert httpx.get(f"{base}/metrics").status_code == 401
    assert "ampwatch_inbox_batches 0" in client.get("/metrics").text


@pytest.mark.parametrize("prefix", ["", "/node/7"])  # of a proxy that strips it, and of one that does not
def test_behind_a_path_prefix(tmp_path: Path, prefix: str) -> None:
    with running(database=str(tmp_path / "a.db"), root_path="/node/7") as server, httpx.Client() as browser:
        base = server.url.removesuffix("/node/7")
        link = server.link.replace("/node/7", prefix)
        answer = browser.get(link)
        assert "Path=/node/7/" in answer.headers["set-cookie"]
        cookie = {"Cookie": answer.headers["set-cookie"].split(";")[0]}
        for path in ("/", "/v1/runs", "/static/base.css", "/assets/docs.js", "/openapi.json"):
            assert httpx.get(f"{base}{prefix}{path}", headers=cookie).status_code == 200, path
        with httpx.Client(
            base_url=base + prefix, headers={"Authorization": f"Bearer {server.token}"}
        ) as sender:
            assert sent.post(sender, sent.attempts(0, 5)).json()["stored"]
