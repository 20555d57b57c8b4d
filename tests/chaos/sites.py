"""Servers and jobs that can be killed, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from ampwatch import spool
from ampwatch.handover import Handover


class Process:
    """One that the zygote has forked."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self._output = pid, output

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def lines(self) -> list[str]:
        """What it has written."""
        return self._output.read_text().splitlines() if self._output.exists() else []

    def until_ready(self) -> Process:
        """Wait for the word."""
        assert settled(lambda: "ready" in self.lines() or not self.is_alive, True, 300)
        assert "ready" in self.lines(), self.lines()
        return self

    def kill(self) -> None:
        """What an OOM killer does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> list[str]:
        """What it has written by its end."""
        assert settled(lambda: self.is_alive, False, 300) is False
        return self.lines()


class Zygote:
    """Forks jobs and servers, see zygote.py."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "zygote.py"
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, script], **pipe)

    def fork(self, what: str, *arguments: object, environ: dict[str, str], output: Path) -> Process:
        """A process of what zygote.py calls by this name."""
        order = {"what": what, "arguments": arguments, "environ": environ, "output": str(output)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Process(int(self._process.stdout.readline()), output)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Site:
    """A folder with the spool, the database and the token of one test; the server's process on a port of its own."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self._zygote = zygote
        self.folder, self.runs, self.database = folder, folder / "runs", folder / "a.db"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "AMPWATCH_DIR": str(self.runs),
            "AMPWATCH_SERVER": self.url,
            "AMPWATCH_RUN": "r",
            "AMPWATCH_FLUSH_S": "0.1",
            "AMPWATCH_QUIET": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._processes: list[Process] = []
        self._lock = threading.Lock()

    def start(self, what: str, *arguments: object) -> Process:
        """A job or a server."""
        with self._lock:
            output = self.folder / f"output-{len(self._processes)}"
            process = self._zygote.fork(what, *arguments, environ=self.environ, output=output)
            self._processes.append(process)
        return process

    def serve(self) -> Process:
        """A server on the site's database, once it answers."""
        return self.start("server", self.port, str(self.database)).until_ready()

    def token(self) -> str:
        """The token that the first server left."""
        return (self.folder / "config" / "ampwatch" / "token").read_text().strip()

    def get(self, path: str) -> dict[str, object]:
        """What the server says."""
        answer = httpx.get(f"{self.url}/v1/{path}", headers={"Authorization": f"Bearer {self.token()}"})
        return dict(answer.raise_for_status().json())

    def sync(self) -> None:
        """Hand over what has not reached the server."""
        report = Handover(self.runs, self.url, self.token(), state_dir=self.folder / "state").send()
        assert (dict(report.refused), report.unreadable) == ({}, 0)

    def spooled(self) -> set[tuple[str, int, str]]:
        """What is on the disk; each batch once."""
        batches = [(batch.producer, batch.seq, batch.digest) for batch in spool.Tail(self.runs).read()]
        assert len(batches) == len(set(batches))
        return set(batches)

    def stored(self) -> set[tuple[str, int, str]]:
        """What the database has taken."""
        return stored(self.database)

    def close(self) -> None:
        """End what was started here."""
        for process in self._processes:
            process.kill()


def stored(database: Path) -> set[tuple[str, int, str]]:
    """Producer, number and digest of every batch that a database has taken."""
    query = (
        "SELECT p.producer, r.seq, lower(hex(r.digest)) FROM receipts r JOIN producers p ON p.id = r.producer"
    )
    connection = sqlite3.connect(database)
    try:
        return set(connection.execute(query))
    finally:
        connection.close()


def settled(ask, wanted, timeout_s=60.0):
    """What `ask` answers once that is what is wanted, or else in the end."""
    deadline = time.monotonic() + timeout_s
    while (answer := ask()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer
