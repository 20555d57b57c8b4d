from __future__ import annotations

import json
import re
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import sent
from sqlalchemy.engine import Connection

from ampwatch.errors import SettingsError
from ampwatch.records import Event
from ampwatch_server.auth import SESSION_S, Auth, first_token
from ampwatch_server.db import Database
from ampwatch_server.serve import Running, running
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings


def test_the_first_token_is_kept_for_its_user_only(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "config" / "ampwatch" / "token"
    token = first_token(service.auth, path)
    assert path.read_text() == f"{token}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first_token(service.auth, path) == token
    assert service.auth.find(token, "token").scopes == {"read", "write", "admin"}


def test_a_token_that_others_can_read_is_refused(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x" * 43)
    path.chmod(0o644)
    with pytest.raises(SettingsError, match=r"has mode 0644: others can read it; chmod 600 it"):
        first_token(service.auth, path)


def test_an_empty_token_file_is_refused(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(SettingsError, match="holds no token"):
        first_token(service.auth, path)


def test_only_hashes_are_stored(service: Service) -> None:
    token = service.auth.issue("token", "ci", ["write"])
    with service.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM tokens").all()
    assert len(rows) == 1
    assert token not in repr(rows)


def test_a_link_works_once(service: Service) -> None:
    code = service.auth.issue("link", "printed", ["read"], 10.0)
    session = service.auth.redeem(code)
    assert service.auth.find(session, "session").kind == "session"
    assert service.auth.redeem(code) is None


def test_links_and_sessions_end(service: Service, clock: list[float]) -> None:
    code = service.auth.issue("link", "printed", ["read"], 10.0)
    session = service.auth.redeem(service.auth.issue("link", "printed", ["read"], 10.0))
    clock[0] += 11
    assert service.auth.redeem(code) is None
    assert service.auth.find(session, "session") is not None
    clock[0] += SESSION_S
    assert service.auth.find(session, "session") is None


def test_guesses_do_not_each_ask_the_database(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(i / 100 for i in range(1000))
    monkeypatch.setattr("ampwatch_server.auth.time", SimpleNamespace(monotonic=lambda: next(moments)))
    reads: list[None] = []
    read = service.database.read
    monkeypatch.setattr(service.database, "read", lambda: reads.append(None) or read())
    assert [service.auth.redeem(f"guess {i}") for i in range(100)] == [None] * 100
    assert len(reads) == 4  # 200 looks, 10 ms apart; what was read is believed for 500 ms


def test_a_known_token_does_not_wait_while_the_database_is_asked_for_another(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = service.auth.issue("token", "known", ["write"])
    assert service.auth.find(token, "token") is not None
    read, asked, answer = service.database.read, threading.Event(), threading.Event()

    def slow() -> AbstractContextManager[Connection]:
        asked.set()
        assert answer.wait(60)
        return read()

    monkeypatch.setattr(service.database, "read", slow)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(service.auth._known, -1.0)
        assert asked.wait(60)
        grant = service.auth.find(token, "token")
        assert grant is not None
        assert service.auth.holds(grant)
        service.auth.used(grant, "10.0.0.1")
        answer.set()
        assert asking.result() == [grant]


def test_what_has_expired_goes_when_the_next_is_admitted(service: Service, clock: list[float]) -> None:
    for kind in ("link", "session", "token"):
        service.auth.issue(kind, f"old {kind}", ["read"], 10.0)
    service.auth.issue("session", "lives", ["read"], 20.0)
    clock[0] += 11
    service.auth.issue("link", "new", ["read"], 10.0)
    with service.database.read() as connection:
        names = connection.exec_driver_sql("SELECT name FROM tokens ORDER BY id").scalars().all()
    assert names == ["old token", "lives", "new"]


def test_a_link_is_no_token(service: Service) -> None:
    code = service.auth.issue("link", "printed", ["read"], 10.0)
    assert service.auth.find(code, "token") is None


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("read", (200, 403, 403, 403)), ("write", (403, 200, 403, 403)), ("admin", (200, 200, 200, 204))],
)
def test_scopes(tmp_path: Path, scope: str, expected: tuple[int, ...]) -> None:
    path = tmp_path / "a.db"
    with running(database=str(path)) as server, httpx.Client(base_url=server.url) as client:
        scoped = {"Authorization": f"Bearer {scoped_token(path, scope)}"}
        client.headers["Authorization"] = f"Bearer {server.token}"
        sent.send(client, sent.attempts(0, 3))
        found = (
            client.get("/v1/runs", headers=scoped),
            sent.post(client, sent.attempts(3, 4, 1), **scoped),
            client.patch("/v1/runs/r", json={"name": "x"}, headers=scoped),
            client.delete("/v1/runs/r", headers=scoped),
        )
        assert tuple(answer.status_code for answer in found) == expected


def scoped_token(path: Path, scope: str) -> str:
    """What another process does beside a running server."""
    settings = Settings(database=str(path))
    database = Database(settings.url)
    token = Auth(database, settings).issue("token", scope, [scope])
    database.close()
    return token


@pytest.fixture
def of_vision(server: Running, client: httpx.Client) -> Iterator[httpx.Client]:
    """Who holds a token of the project "vision", beside a run "other" of another project."""
    told = Event("run", 1.0, data={"project": "language"})
    sent.send(client, sent.events(told, run="other", producer=sent.Q))
    sent.until(lambda: client.get("/v1/runs/other").json().get("project") == "language")
    asked = {"name": "vision", "scopes": ["admin"], "project": "vision"}
    made = client.post("/v1/tokens", json=asked).json()
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {made['token']}"}) as one:
        yield one


def test_a_token_of_a_project_sees_that_project_alone(client: httpx.Client, of_vision: httpx.Client) -> None:
    sent.send(of_vision, sent.events(Event("run", 1.0, data={"project": "language", "name": "mine"})))
    sent.until(lambda: of_vision.get("/v1/runs/r").json().get("name") == "mine")
    assert of_vision.get("/v1/runs/r").json()["project"] == "vision"  # whatever the job says
    assert [run["run"] for run in of_vision.get("/v1/runs").json()["items"]] == ["r"]
    assert of_vision.get("/v1/runs?project=language").json()["items"] == []
    assert {run["run"] for run in client.get("/v1/runs").json()["items"]} == {"r", "other"}


def test_of_other_projects_it_hears_nothing_on_any_route(of_vision: httpx.Client) -> None:
    described = of_vision.get("/openapi.json").json()["paths"]
    routes = [(method, path) for path, methods in described.items() for method in methods if "{run}" in path]
    asked = [(method, re.sub(r"\{\w+\}", "0", path.replace("{run}", "other"))) for method, path in routes]
    asked += [
        ("get", f"/v1/{path}")
        for path in ("compare?runs=other", "compare/figure?runs=other", "live?run=other")
    ]
    assert len(asked) > 20
    answered = {(method, path): of_vision.request(method, path).status_code for method, path in asked}
    assert answered == dict.fromkeys(asked, 404)


def test_of_the_server_it_hears_nothing(of_vision: httpx.Client) -> None:
    paths = ("/v1/tokens", "/v1/audit", "/v1/alerts", "/metrics")
    assert [of_vision.get(path).status_code for path in paths] == [403] * 4
    assert of_vision.post("/v1/tokens", json={"name": "x", "scopes": ["read"]}).status_code == 403
    assert of_vision.delete("/v1/tokens/1").status_code == 403
    assert of_vision.post("/v1/alerts/x/test").status_code == 403


def test_a_token_of_a_project_sends_nothing_into_another(of_vision: httpx.Client) -> None:
    answer = sent.post(of_vision, sent.attempts(0, 3, run="other"))
    told = "run other is not one of project 'vision', which this token is for"
    assert (answer.status_code, answer.json()["detail"]) == (403, told)
    assert sent.post(of_vision, sent.attempts(0, 3)).status_code == 200


def test_the_live_stream_of_a_project_tells_of_no_other(
    client: httpx.Client, of_vision: httpx.Client
) -> None:
    sent.send(of_vision, sent.events(Event("run", 1.0)))
    sent.until(lambda: client.get("/v1/runs/r").json().get("run") == "r")
    with of_vision.stream("GET", "/v1/live") as response:
        first = next(line for line in response.iter_lines() if line.startswith("data:"))
    assert json.loads(first.removeprefix("data:"))["run"] == "r"


def test_a_browser_gets_a_cookie_for_the_link(server: Running) -> None:
    with httpx.Client(follow_redirects=False) as browser:
        answer = browser.get(server.link)
        assert (answer.status_code, answer.headers["location"]) == (303, "../")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert browser.get(f"{server.url}/v1/runs").status_code == 200
        assert browser.get(f"{server.url}/").status_code == 200


def test_a_link_that_was_opened_is_followed_by_the_next(server: Running) -> None:
    spent = server.link
    assert httpx.get(spent).status_code == 303
    assert server.renewed.wait(5)
    assert [httpx.get(link).status_code for link in (spent, server.link)] == [401, 303]


def test_an_unknown_browser_is_told_what_to_do(server: Running) -> None:
    for path in ("/", "/run/x", "/docs", "/link/used-up"):
        answer = httpx.get(f"{server.url}{path}")
        assert answer.status_code == 401
        assert "Open the link that the server printed" in answer.text


def test_an_unknown_token_is_told_from_none(server: Running) -> None:
    answer = httpx.get(f"{server.url}/v1/runs", headers={"Authorization": "Bearer nonsense"})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "this server does not know the token" in answer.json()["detail"]


@pytest.mark.parametrize("header", ["Basic abc", "Bearer", ""])
def test_an_unknown_program_is_told_what_to_send(server: Running, header: str) -> None:
    answer = httpx.get(f"{server.url}/v1/runs", headers={"Authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer <token>" in answer.json()["detail"]


def test_edits_and_deletions_are_written_down(service: Service) -> None:
    grant = service.auth.find(service.auth.issue("token", "ci", ["admin"]), "token")
    service.database.write(lambda c: service.auth.note(c, grant.who, "delete", "r"))
    with service.database.read() as connection:
        rows = connection.exec_driver_sql("SELECT who, action, subject FROM audit").all()
    assert [tuple(row) for row in rows] == [("token ci 1", "delete", "r")]


def test_two_servers_on_one_machine_keep_their_sessions_apart(tmp_path: Path) -> None:
    with (
        running(database=str(tmp_path / "a.db")) as one,
        running(database=str(tmp_path / "b.db")) as other,
        httpx.Client(follow_redirects=True) as browser,
    ):
        assert browser.get(one.link).status_code == 200
        assert browser.get(other.link).status_code == 200
        assert [browser.get(f"{server.url}/").status_code for server in (one, other)] == [200, 200]
