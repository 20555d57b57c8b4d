"""How a job can end: what was recorded is on the disk, nothing hangs, and nobody else hears of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch

import ampwatch
from ampwatch import spool
from ampwatch.settings import Settings

# A training loop without torch: a row every 10 ms, and the word to end it once some have been flushed.
JOB = """
import os, signal, sys, threading, time
import numpy as np
from ampwatch import recorder
from ampwatch.recorder import Harvest

class Rows:
    attempt = 0
    def harvest(self, final):
        count = job.next_attempt() - self.attempt
        table = {"attempt": np.arange(count) + self.attempt, "scale": np.ones(count), "time": np.full(count, time.time())}
        self.attempt += count
        flushed.append(count)
        return Harvest(table)

flushed = []
job = recorder.current()
job.attach(Rows())
job.event("scaler")
while len(flushed) < 3:
    job.next_attempt()
    time.sleep(0.01)
print(time.time(), flush=True)
"""

ENDINGS = {
    "exit": ("", 0),
    "exception": ("raise ValueError('of the user')", 1),
    "interrupt": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT),
    "os._exit": ("os._exit(3)", 3),
    "abort": ("os.abort()", -signal.SIGABRT),
    "terminate": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(9)", -signal.SIGKILL),
    "hang": (
        "threading.Timer(0.5, os.kill, (os.getpid(), 9)).start(); threading.Semaphore(0).acquire()",
        -signal.SIGKILL,
    ),
    "fork": ("os.waitpid(os.fork() or sys.exit(0), 0)", 0),
}


def run(folder, code, **environ):
    given = {"AMPWATCH_DIR": str(folder), "AMPWATCH_FLUSH_S": "0.1", "AMPWATCH_QUIET": "1"} | environ
    done = subprocess.run(
        [sys.executable, "-c", JOB + code], env=os.environ | given, capture_output=True, text=True, timeout=60
    )
    return done, float(done.stdout), time.time()


@pytest.mark.parametrize("ending", ENDINGS)
def test_records_up_to_the_last_flush_are_on_the_disk(ending, tmp_path):
    code, status = ENDINGS[ending]
    done, end, _ = run(tmp_path, code)
    assert done.returncode == status
    tables = [batch.table() for batch in spool.read(tmp_path) if batch.kind == "attempts"]
    assert end - tables[-1]["time"][-1] < 1.0
    assert len({batch.producer for batch in spool.read(tmp_path)}) == 1
    assert "ampwatch" not in done.stderr


def test_a_server_that_never_answers_delays_the_exit_by_a_bounded_time(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        server = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done, end, ended = run(tmp_path, "", AMPWATCH_SERVER=server)
    assert ended - end < 6.0
    assert done.stderr.splitlines() == [
        f"ampwatch: the server did not take the last records within 4 s; they are kept in {tmp_path}"
    ]


def test_a_server_that_is_not_there_does_not_delay_the_exit(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        server = f"http://127.0.0.1:{gone.getsockname()[1]}"
    done, end, ended = run(tmp_path, "", AMPWATCH_SERVER=server)
    assert ended - end < 3.0
    assert [line.partition(" cannot be reached: ")[2][:18] for line in done.stderr.splitlines()] == [
        "Connection refused"
    ]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((4,), float(i))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_of_a_data_loader_record_nothing_and_are_silent(tmp_path, capfd):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = ampwatch.GradScaler("cpu", model=model, settings=Settings.load(dir=tmp_path, quiet=True))
    loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            scaler.scale(model(batch).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    ampwatch.finish()
    batches = list(spool.read(tmp_path))
    assert len({batch.producer for batch in batches}) == 1
    assert sum(len(batch.table()["attempt"]) for batch in batches if batch.kind == "attempts") == 8
    assert capfd.readouterr().err == ""


def test_what_the_recorders_thread_needs_is_imported_before_it_runs():
    """A child forked while a thread imports would be left with half a module."""
    code = (
        "import sys; from ampwatch import recorder, worker; worker.Worker.start = lambda self: None;"
        "recorder.current().event('scaler');"
        "assert {'ampwatch.diagnosis.engine', 'httpx'} <= set(sys.modules)"
    )
    environ = os.environ | {"AMPWATCH_SERVER": "http://127.0.0.1:9"}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 0
