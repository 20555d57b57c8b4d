"""What is acknowledged is on the disk: seen from outside, by the system calls of a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import sent

STRACE = shutil.which("strace")
CALLS = "trace=fsync,fdatasync,write,writev,sendto,sendmsg"


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_a_sync_precedes_each_answer(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    command = [sys.executable, "-m", "ampwatch", "serve", "--port", "0", "--database", str(tmp_path / "a.db")]
    environ = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    traced = [str(STRACE), "-f", "--seccomp-bpf", "-e", CALLS, "-s", "16", "-o", str(log), *command]
    with subprocess.Popen(traced, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = first_url(server)
            token = (tmp_path / "ampwatch" / "token").read_text().strip()
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client:
                sent.send(client, *(sent.attempts(i, i + 1, i) for i in range(5)))
        finally:
            subprocess.run(["kill", "-TERM", child(server.pid)], check=True)
    assert synced_before_each(log.read_text()) == [True] * 5


def first_url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://[^/ ]+", line):
            return found.group()
    raise AssertionError("the server did not start")


def child(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]


def synced_before_each(calls: str) -> list[bool]:
    """For each answer 200 whether a sync came back since the answer before."""
    found, synced = [], False
    for line in calls.splitlines():
        if re.search(r"f(data)?sync\(\d+\) += 0|f(data)?sync resumed>\) += 0", line):
            synced = True
        elif "HTTP/1.1 200" in line:
            found.append(synced)
            synced = False
    return found
