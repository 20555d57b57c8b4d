"""Marks on findings and alerts: once each, never to where they must not go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import sent
from test_diagnoser import found, overflowing

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.errors import SettingsError
from ampwatch_server.alerts import GIVE_UP_S, SILENT_S, Alerts
from ampwatch_server.destinations import (
    AlertSettings,
    Destination,
    NoAnswer,
    NotSent,
    is_public,
    read_alerts,
    send,
)
from ampwatch_server.serve import running
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings
from ampwatch_server.store.findings import FindingNotFound, mark_finding


def service_with(database: str, clock: list[float], *destinations: Destination) -> Service:
    alerts = AlertSettings(destinations, link="https://amp.example/")
    settings = Settings(database=database, clock=lambda: clock[0], alerts=alerts)
    return Service(settings, Diagnosis)


class Post:
    """Takes messages, or refuses them."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, object]]] = []
        self.refuses = False

    def __call__(self, destination: Destination, message: dict[str, object]) -> str:
        self.messages.append((destination.name, message))
        if self.refuses:
            raise NotSent("answered 503")
        return "answered 200"


def outbox(service: Service, post: Post) -> Alerts:
    return Alerts(service.database, service.settings, post)


@pytest.fixture
def alerting(database: str, clock: list[float]) -> Iterator[Service]:
    service = service_with(database, clock, Destination("ops", "https://a.example"))
    yield service
    service.database.close()


def test_a_finding_is_told_once_whoever_diagnoses_it(alerting: Service, clock: list[float]) -> None:
    sent.store(alerting, *overflowing())
    clock[0] += alerting.settings.lease_s + 1
    other, post = Service(alerting.settings, Diagnosis), Post()
    sent.store(other, sent.attempts(12, 14, 2, loss=[float("nan")] * 2, found_inf=[1, 1], skipped=[1, 1]))
    severe = [f["key"] for f in found(alerting)["findings"] if f["severity"] in ("fatal", "error")]
    senders = [threading.Thread(target=outbox(s, post).send_due) for s in (alerting, other)]
    [thread.start() for thread in senders], [thread.join() for thread in senders]
    other.database.close()
    told = [(m["run"], m["finding"]["key"], m["link"]) for _, m in post.messages]
    assert sorted(told) == sorted(("r", k, f"https://amp.example/run/r?finding={k}") for k in severe)


def test_what_is_not_taken_is_tried_again_ever_more_rarely_then_given_up(
    alerting: Service, clock: list[float]
) -> None:
    sent.store(alerting, *overflowing())
    post = Post()
    alerts, post.refuses = outbox(alerting, post), True
    count = alerts.send_due()
    assert count > 0
    assert alerts.send_due() == 0  # not due yet
    clock[0] += 13
    assert alerts.send_due() == count
    clock[0] += 13
    assert alerts.send_due() == 0
    clock[0] += GIVE_UP_S
    assert alerts.send_due() == count
    with alerting.database.read() as connection:
        shown = alerts.shown(connection)[0]
    assert (shown["waiting"], shown["sent"], shown["not_sent"]) == (0, 0, count)
    assert shown["last_outcome"] == "answered 503"


def test_a_destination_that_does_not_answer_keeps_no_other_waiting(database: str, clock: list[float]) -> None:
    asked = []

    def post(destination: Destination, message: dict[str, object]) -> str:
        asked.append(destination.name)
        if destination.name == "hangs":
            raise NoAnswer("no answer: ReadTimeout")
        return "answered 200"

    both = (Destination(name, f"https://{name}.example") for name in ("hangs", "ops"))
    service = service_with(database, clock, *both)
    for producer, run in ((sent.P, "r"), (sent.Q, "s")):
        sent.store(service, *overflowing(producer=producer, run=run))
    alerts = Alerts(service.database, service.settings, post)
    assert (alerts.send_due(), sorted(asked)) == (3, ["hangs", "ops", "ops"])
    clock[0] += SILENT_S + 1
    assert (alerts.send_due(), asked[3:]) == (1, ["hangs"])
    clock[0] += GIVE_UP_S
    alerts.send_due()
    with service.database.read() as connection:
        hangs = next(shown for shown in alerts.shown(connection) if shown["name"] == "hangs")
    assert (hangs["waiting"], hangs["not_sent"]) == (0, 2)
    service.database.close()


def test_a_server_that_died_while_sending_leaves_the_alert_to_another(
    alerting: Service, clock: list[float]
) -> None:
    def dies(destination: Destination, message: dict[str, object]) -> str:
        raise KeyboardInterrupt

    sent.store(alerting, *overflowing())
    with pytest.raises(KeyboardInterrupt):
        Alerts(alerting.database, alerting.settings, dies).send_due()
    post = Post()
    first = outbox(alerting, post).send_due()
    clock[0] += 61
    assert outbox(alerting, post).send_due() == 1
    assert len({m["finding"]["key"] for _, m in post.messages}) == first + 1


def test_a_destination_hears_what_it_asked_for() -> None:
    only = Destination("a", "https://a.example", severity=None, kinds=("spike",))
    assert only.wants("spike", "info")
    assert not only.wants("dead_zone", "fatal")
    severe = Destination("a", "https://a.example", severity="warning", kinds=("spike",))
    assert [severe.wants("x", s) for s in ("fatal", "error", "warning", "info")] == [True, True, True, False]
    assert severe.wants("spike", "info")


def test_a_mark_stands_over_the_next_diagnosis(service: Service, clock: list[float]) -> None:
    sent.store(service, *overflowing())
    key = found(service)["findings"][0]["key"]
    told = {"state": "recovered", "mark": "muted", "marked_by": "ada", "marked_at": 5.0}
    service.database.write(lambda c: mark_finding(c, "r", key, "muted", "ada", 5.0))
    sent.store(service, sent.attempts(12, 14, 2))
    finding = found(service)["findings"][0]
    assert (finding["key"], {name: finding[name] for name in told}) == (key, told)
    service.database.write(lambda c: mark_finding(c, "r", key, None, "ada", 6.0))
    assert found(service)["findings"][0]["mark"] is None
    with pytest.raises(FindingNotFound, match="has no finding 'x'"):
        service.database.write(lambda c: mark_finding(c, "r", "x", "muted", "ada", 5.0))


def test_of_a_marked_finding_nothing_is_sent(alerting: Service) -> None:
    sent.store(alerting, *overflowing())
    for finding in found(alerting)["findings"]:
        alerting.database.write(
            lambda c, k=finding["key"]: mark_finding(c, "r", k, "acknowledged", "ada", 1.0)
        )
    assert outbox(alerting, Post()).send_due() == 0


def test_the_past_is_no_news(alerting: Service, clock: list[float]) -> None:
    for batch in overflowing():
        alerting.inbox.append(batch, sent.check(batch), time=clock[0] - 90_000).result()
    alerting.compactor.process("r")
    assert found(alerting)["verdict"]["word"] == "failing"
    assert outbox(alerting, Post()).send_due() == 0


@contextmanager
def webhook(status: int = 200) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    """A real server that notes what is posted; its address and what it got."""
    got: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Host"], body))
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(b"a secret")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://hook.example:{server.server_port}/t?k=v", got
    server.shutdown()
    thread.join()
    server.server_close()


def local(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def test_a_message_goes_to_the_address_that_was_checked() -> None:
    with webhook() as (url, got):
        destination = Destination("a", url, allow_private=True)
        assert send(destination, {"text": "hi"}, local) == "answered 200"
    assert got == [("/t?k=v", httpx.URL(url).netloc.decode(), b'{"text":"hi"}')]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_no_redirect_is_followed_and_no_body_shown(status: int) -> None:
    with webhook(status) as (url, got), pytest.raises(NotSent, match=rf"^answered {status}$"):
        send(Destination("a", url, allow_private=True), {}, local)
    assert len(got) == 1


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "fe80::1%eth0",
        "::ffff:127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
        "64:ff9b:1::5db8:d822",  # NAT64 of a network's own
        "2002:a9fe:a9fe::1",  # 6to4 of 169.254.169.254
        "::a00:1",  # IPv4-compatible 10.0.0.1
        "::ffff:0:a00:1",  # IPv4-translated 10.0.0.1
    ],
)
def test_no_message_goes_to_a_private_address(address: str) -> None:
    with pytest.raises(NotSent, match="loopback or private"):
        send(Destination("a", "https://a.example"), {}, lambda _host, _port: ["93.184.216.34", address])


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822", "2002:5db8:d822::1"]
)
def test_an_address_that_stands_for_a_public_one_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "truncated"),
        ('{"destinations": [{"name": "a", "url": "ftp://x"}]}', "the url of 'a' must begin with https://"),
        ('{"destinations": [{"name": "a", "url": "https://x", "to": 1}]}', "unknown field `to`"),
        ('{"destinations": [{"name": "", "url": "https://x"}]}', "needs a name of its own"),
    ],
)
def test_an_alert_file_that_is_wrong_says_where(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "alerts.json").write_text(text)
    with pytest.raises(SettingsError, match=told):
        read_alerts(tmp_path / "alerts.json")


def test_from_a_batch_to_slack_and_the_test_button(tmp_path: Path, connect) -> None:
    with webhook() as (url, got):
        here = url.replace("hook.example", "127.0.0.1")
        ops = Destination("ops", here, shape="slack", severity="fatal", allow_private=True)
        alerts = AlertSettings((ops, Destination("out", here)), link="https://amp.example")
        with running(database=str(tmp_path / "a.db"), alerts=alerts) as server, connect(server) as client:
            assert client.post("/v1/alerts/ops/test").json() == {"sent": True, "outcome": "answered 200"}
            refused = client.post("/v1/alerts/out/test").json()
            assert refused["sent"] is False
            assert "private" in refused["outcome"]
            assert client.post("/v1/alerts/none/test").status_code == 404
            sent.send(client, *overflowing())
            text = json.loads(sent.until(lambda: got[1:])[0][2])["text"]
            assert url not in client.get("/v1/alerts").text
    assert text.startswith("*fatal* in x: ")
    assert "<https://amp.example/run/r?finding=" in text


def test_marks_are_put_by_rest_and_told_to_watchers(client: httpx.Client) -> None:
    sent.send(client, *overflowing())
    key = sent.until(lambda: client.get("/v1/runs/r/findings").json().get("findings"))[0]["key"]
    path = f"/v1/runs/r/findings/{key}"
    assert client.patch(path, json={"mark": "acknowledged"}).json()["state"] == "acknowledged"
    assert client.patch(path, json={"mark": "gone"}).json()["field"] == "mark"
    assert client.patch("/v1/runs/r/findings/x%00", json={"mark": None}).status_code == 404
    entry = client.get("/v1/audit").json()["items"][0]
    assert (entry["action"], entry["subject"]) == ("acknowledged", f"r {key}")


def test_an_alert_that_fails_stops_no_other_and_is_given_up_in_time(
    alerting: Service, clock: list[float]
) -> None:
    def fail(destination: Destination, message: dict[str, object]) -> str:
        raise ValueError("a fault of ours")

    sent.store(alerting, *overflowing())
    alerts = Alerts(alerting.database, alerting.settings, fail)
    assert alerts.send_due() == 1
    with alerting.database.read() as connection:
        assert alerts.shown(connection)[0]["last_outcome"] == "failed; the server's log says why"
    clock[0] += GIVE_UP_S + 1
    assert (alerts.send_due(), alerts.send_due()) == (1, 0)
