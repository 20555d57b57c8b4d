"""Three servers on one PostgreSQL behind nginx: one is killed while batches come, and each is stored once."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import sent
import sqlalchemy as sa

from ampwatch import spool
from ampwatch.recorder import Harvest, Recorder
from ampwatch.records import Batch, Table
from ampwatch.settings import Settings
from ampwatch_server import tables as t

SERVER = """
import signal, sys
from pathlib import Path
from ampwatch_server.serve import running
with running(database=sys.argv[1], token_file=Path(sys.argv[2]), lease_s=2.0) as server:
    print(server.url, flush=True)
    signal.pause()
"""
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream servers {{ {servers} }}
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://servers; proxy_set_header Host $host; }} }}
}}
"""
BATCHES = 40  # of each of three senders
ROWS = 5


@contextmanager
def one_server(database: str, token: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-W", "error", "-c", SERVER, database, str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@contextmanager
def balanced(urls: list[str], folder: Path) -> Iterator[str]:
    """The address of an nginx that hands requests to each server in turn."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("no nginx on this machine")
    folder.mkdir()
    port = free_port()
    servers = " ".join(f"server {httpx.URL(url).netloc.decode()} fail_timeout=1s;" for url in urls)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, servers=servers, port=port))
    with subprocess.Popen(
        [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    ) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            sent.until(lambda: answers(url), 30)
            yield url
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=30).is_success
    except httpx.HTTPError:
        return False


def send_all(url: str, token: str, batches: list[Batch], acknowledged: list[tuple[str, int]]) -> None:
    """Send batches one by one, each until it is acknowledged: who loses an answer sends again."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
        for batch in batches:
            while not taken(client, batch):
                time.sleep(0.05)
            acknowledged.append((batch.producer, batch.seq))


def taken(client: httpx.Client, batch: Batch) -> bool:
    try:
        return sent.post(client, batch).status_code == 200
    except httpx.HTTPError:
        return False


class Rows:
    """Harvests of a training job, a few attempts each."""

    def __init__(self, count: int) -> None:
        self.left = [Harvest(rows(i), None, []) for i in range(count)]

    def harvest(self, final: bool) -> Harvest:
        return self.left.pop(0) if self.left else Harvest()


def rows(i: int) -> Table:
    attempt = np.arange(i * ROWS, (i + 1) * ROWS)
    return {"attempt": attempt, "stream": 0 * attempt, "time": 1.0 + attempt, "scale": np.ones(ROWS)}


def stored(database: str) -> list[tuple[str, int]]:
    """(producer, seq) of every receipt."""
    engine = sa.create_engine(database)
    query = sa.select(t.producers.c.producer, t.receipts.c.seq).join(t.receipts)
    with engine.connect() as connection:
        found = [(row.producer, row.seq) for row in connection.execute(query)]
    engine.dispose()
    return found


@pytest.mark.parametrize("database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
def test_a_server_that_is_killed_takes_nothing_with_it(database: str, tmp_path: Path) -> None:
    token, acknowledged = tmp_path / "token", []
    with ExitStack() as stack:
        servers = [stack.enter_context(one_server(database, token)) for _ in range(3)]
        url = stack.enter_context(balanced([url for _, url in servers], tmp_path / "nginx"))
        secret = token.read_text().strip()
        jobs = {
            name * 32: [
                sent.attempts(i * ROWS, (i + 1) * ROWS, i, producer=name * 32) for i in range(BATCHES)
            ]
            for name in "123"
        }
        senders = [
            threading.Thread(target=send_all, args=(url, secret, job, acknowledged)) for job in jobs.values()
        ]
        recorder = Recorder(
            Settings(server=url, token=secret, dir=tmp_path / "spool", run="job", flush_s=0.05, quiet=True)
        )
        source = Rows(BATCHES)
        recorder.attach(source)
        recorder.event("loss_dtype", attempt=0, dtype="float32")
        [sender.start() for sender in senders]
        sent.until(lambda: len(acknowledged) > BATCHES, 60)
        servers[1][0].kill()
        [sender.join() for sender in senders]
        sent.until(lambda: not source.left, 60)  # a harvest at a time
        recorder.finish()
        spooled = {(b.producer, b.seq) for b in spool.read(tmp_path / "spool")}
        send_all(url, secret, list(spool.read(tmp_path / "spool")), acknowledged)  # as `ampwatch sync` does
        found = stored(database)
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, timeout=30) as client:
            expected = {"r": BATCHES * ROWS, "job": BATCHES * ROWS}
            sent.until(lambda: all(attempts_of(client, run) == {n} for run, n in expected.items()), 60)
    assert len(found) == len(set(found))
    assert set(found) == set(acknowledged) | spooled
    assert {(name, i) for name in jobs for i in range(BATCHES)} <= set(acknowledged)


def attempts_of(client: httpx.Client, run: str) -> set[int]:
    """Attempts of each producer of a run, as whichever server says."""
    try:
        return {producer["attempts"] for producer in client.get(f"/v1/runs/{run}").json()["producers"]}
    except (httpx.HTTPError, KeyError, ValueError):
        return set()
