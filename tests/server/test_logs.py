"""Request ids, JSON lines, and what must stand in none of them."""

from __future__ import annotations

import json
import logging
import re
import socket

import httpx
import pytest
import sent

from ampwatch_server.auth import COOKIE
from ampwatch_server.logs import REQUEST_ID, JsonLines, redacted
from ampwatch_server.serve import Running


@pytest.mark.parametrize(
    ("given", "kept"), [("a-1.b_2", True), ("a b", False), ("x" * 65, False), ("a;b", False)]
)
def test_a_request_keeps_a_sound_id_and_gets_one_else(client: httpx.Client, given: str, kept: bool) -> None:
    answers = [client.get("/v1/runs", headers={"X-Request-ID": given}) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert (ids == [given, given]) == kept
    assert kept or ids[0] != ids[1]


def test_every_request_is_a_line_without_its_query(
    client: httpx.Client, server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ampwatch_server")
    client.get("/v1/runs?q=secret", headers={"X-Request-ID": "me"})
    client.get(server.link, follow_redirects=False)
    lines = lambda: [r for r in caplog.records if r.name == "ampwatch_server.logs"]  # noqa: E731
    sent.until(lambda: len(lines()) == 2)  # a line is written once its answer is on the way
    told = [json.loads(JsonLines().format(line)) for line in lines()]
    assert {n: told[0][n] for n in ("level", "method", "path", "status")} == {
        "level": "info",
        "method": "GET",
        "path": "/v1/runs",
        "status": 200,
    }
    assert told[1]["path"] == "/link/[redacted]"
    assert server.token not in caplog.text


def test_a_line_tells_the_request_and_the_traceback() -> None:
    REQUEST_ID.set("r1")
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "it %s", ("broke",), True)
        record.exc_info = (ValueError, ValueError("x"), None)
    line = json.loads(JsonLines().format(record))
    REQUEST_ID.set("")
    assert (line["message"], line["request_id"], line["exception"]) == ("it broke", "r1", "ValueError: x")


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer SECRET",
        f"Cookie: {COOKIE}=SECRET; a=b",
        f"Cookie: {COOKIE}_8765=SECRET; a=b",
        "GET /link/SECRET?x",
        "postgresql://ada:SECRET@db/x",
        "told " + "SECRET" + "x" * 37,
    ],
)
def test_no_secret_is_logged(text: str) -> None:
    assert "SECRET" not in redacted(text)
    assert "[redacted]" in redacted(text)


def test_what_is_no_secret_stays() -> None:
    text = "run 01JDQ5W3Z8R6J2N7V4K1T9M0XC of producer " + "ab" * 16 + " digest " + "0f" * 32
    assert redacted(text) == text


def test_an_error_of_ours_is_an_answer_with_its_id(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampwatch_server.routes.runs.store.list_runs", lambda *_, **__: 1 / 0)
    answer = client.get("/v1/runs", headers={"X-Request-ID": "me"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "me")
    assert answer.json()["detail"] == "the server met an error of its own; its log says more"
    assert "ZeroDivisionError" in caplog.text


def test_what_is_no_request_is_refused_with_an_id(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert lines[0] == "HTTP/1.1 400 Bad Request"
    assert re.fullmatch("[0-9a-f]{16}", headers["x-request-id"])
    assert headers["content-type"] == "application/problem+json"
    assert int(headers["content-length"]) == len(body)
    told = "this is no HTTP request that the server can read"
    assert json.loads(body) == {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": told}
