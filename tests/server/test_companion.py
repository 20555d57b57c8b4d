"""The compactor in a process of its own, beside real servers."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sent
import sqlalchemy as sa

from ampwatch.records import Event
from ampwatch_server import tables as t
from ampwatch_server.agenda import New
from ampwatch_server.companion import WAITING, Companion
from ampwatch_server.db import Database
from ampwatch_server.metrics import Metrics
from ampwatch_server.serve import running
from ampwatch_server.settings import Settings, database_url

SERVER = """
import sys
from ampwatch_server.serve import serve
serve(port=0, database=sys.argv[1], ready=lambda link: print(link, flush=True))
"""


def children(pid: int) -> list[int]:
    found = [read(path).split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in found for child in each if lives(int(child))]


def read(path: Path) -> bytes:
    """Of a thread or a process, which may end meanwhile."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def lives(pid: int) -> bool:
    return b"companion" in read(Path(f"/proc/{pid}/cmdline"))


def one_child(pid: int, *, but: int = 0) -> int:
    return sent.until(lambda: next((child for child in children(pid) if child != but), 0))


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def left_in(database: str) -> tuple[int, list[str]]:
    """What waits in the inbox, and who holds leases."""
    opened = Database(database_url(database))
    with opened.read() as connection:
        waiting = connection.execute(sa.select(sa.func.count()).select_from(t.inbox)).scalar_one()
        holders = connection.scalars(sa.select(t.run_state.c.holder)).all()
    opened.close()
    return waiting, [holder for holder in holders if holder]


@pytest.fixture
def server_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """`serve` in a process, as a user starts it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    command = [sys.executable, "-c", SERVER, str(tmp_path / "a.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_folds_diagnoses_and_tells_the_server(database: str, connect) -> None:
    lost = Event("dropped", 1.0, data={"reason": "queue", "first_seq": 3, "last_seq": 5})
    with running(database=database, compactor="process") as server, connect(server) as client:
        child = one_child(os.getpid())
        with client.stream("GET", "/v1/live", timeout=30) as news:
            sent.send(client, sent.attempts(0, 3000), sent.events(lost, seq=1))
            state = next(line for line in news.iter_lines() if '"attempts":3000' in line)
        sent.until(lambda: 'ampwatch_dropped_total{reason="queue"} 3' in client.get("/metrics").text)
        sent.until(lambda: client.get("/v1/runs/r").json()["verdict"]["word"] == "healthy")
        assert metric(client, "ampwatch_lag_seconds") < 10
    assert '"run":"r"' in state
    assert not lives(child)
    waiting, holders = left_in(database)
    assert waiting <= 1  # the last window goes on
    assert holders == []


def test_one_that_is_killed_is_started_again(tmp_path: Path, connect, caplog) -> None:
    with running(database=str(tmp_path / "a.db"), compactor="process") as server, connect(server) as client:
        sent.send(client, sent.attempts(0, 1024))
        first = one_child(os.getpid())
        os.kill(first, signal.SIGKILL)
        sent.send(client, sent.attempts(1024, 2048, 1))
        one_child(os.getpid(), but=first)
        sent.until(lambda: client.get("/v1/runs/r").json().get("attempts") == 2048, 30)
        assert metric(client, "ampwatch_compactor_restarts_total") == 1
    assert "the compactor's process ended (exit status -9)" in caplog.text


@pytest.mark.parametrize("does", ["printf '{\"log\":[40,'", "exec 0<&-; sleep 0.5"])
def test_one_that_ends_amid_a_line_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, does: str
) -> None:
    """Of its own, or of the server's, which it does not read."""
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\n{does}\nkill -9 $$\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    metrics = Metrics()
    companion = Companion(Settings(database=str(tmp_path / "a.db")), lambda _run: None, metrics)
    companion.start()
    for _ in range(20):
        companion.announce({"r": [New((1, 0), 100)]})
        time.sleep(0.02)
    sent.until(lambda: "ampwatch_compactor_restarts_total 2" in metrics.text({}))
    companion.stop()
    assert "ended (exit status -9)" in caplog.text
    assert "Broken pipe" not in caplog.text


def test_files_of_the_working_directory_are_not_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connect
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not the queue that was asked for')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with running(database=str(tmp_path / "a.db"), compactor="process") as server, connect(server) as client:
        sent.send(client, sent.attempts(0, 1024))
        sent.until(lambda: client.get("/v1/runs/r").json().get("attempts") == 1024, 30)
        assert metric(client, "ampwatch_compactor_restarts_total") == 0


def test_it_ends_with_a_server_that_is_killed(server_process: subprocess.Popen[str]) -> None:
    assert "http://" in server_process.stdout.readline()
    child = one_child(server_process.pid)
    server_process.kill()
    sent.until(lambda: not lives(child))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_the_server_heeds_signals(server_process: subprocess.Popen[str], number: int) -> None:
    assert "http://" in server_process.stdout.readline()
    child = one_child(server_process.pid)
    sent.until(lambda: ignores(child, number))
    os.kill(child, number)
    time.sleep(0.2)
    assert lives(child)
    assert os.getsid(child) != os.getsid(server_process.pid)  # Ctrl-C of a terminal does not reach it
    server_process.send_signal(number)
    server_process.wait(30)
    assert not lives(child)


def ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored, 16) >> (number - 1) & 1)


def test_one_that_does_not_read_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(database=str(tmp_path / "a.db"))
    made = Database(settings.url)
    made.migrate()
    made.close()
    monkeypatch.setattr("ampwatch_server.companion.STOP_S", 0.5)
    companion = Companion(settings, lambda _run: None, Metrics())
    companion.start()
    child = one_child(os.getpid())
    os.kill(child, signal.SIGSTOP)
    for seq in range(WAITING + 3000):  # more than the pipe holds
        companion.announce({"r": [New((1, seq), 100)]})
    assert companion._lines.qsize() <= WAITING
    companion.stop()  # nor does it when the server ends
    assert not lives(child)


def test_it_can_be_stopped_at_once(tmp_path: Path) -> None:
    for _ in range(5):
        companion = Companion(Settings(database=str(tmp_path / "a.db")), lambda _run: None, Metrics())
        companion.start()
        companion.stop()
        assert children(os.getpid()) == []


def test_what_it_logs_is_logged_here(tmp_path: Path, connect, caplog) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "a.db"
    with running(database=str(path), compactor="process") as server, connect(server) as client:
        one_child(os.getpid())
        opened = Database(database_url(str(path)))
        broken = sa.text("ALTER TABLE events RENAME TO events_no_more")
        opened.write(lambda connection: connection.execute(broken))
        sent.send(client, sent.events(Event("run", 1.0)))
        sent.until(lambda: "work on run r is put off" in caplog.text)
        opened.close()


def test_nothing_is_told_before_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = tmp_path / "heard"
    listening = tmp_path / "python"
    listening.write_text(f"#!/bin/sh\nhead -n 1 >> {heard}\n")
    listening.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(listening))
    for _ in range(20):
        companion = Companion(Settings(database=str(tmp_path / "a.db")), lambda _run: None, Metrics())
        companion.start()
        for seq in range(2000):
            companion.announce({"r": [New((1, seq), 100)]})
        companion.stop()
    lines = heard.read_text().splitlines()
    assert lines
    assert all(line.startswith('{"database":') for line in lines)


def test_it_ends_where_the_server_ended_before_it_began(capfd: pytest.CaptureFixture[str]) -> None:
    program = "from ampwatch_server.companion import main; main()"
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, check=False)
    assert (done.returncode, capfd.readouterr().err) == (0, "")
