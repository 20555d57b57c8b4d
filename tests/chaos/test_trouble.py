"""What goes wrong around a recorder: the network, the disk, the clock, restarts, forks. Nothing is lost or doubled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from proxy import Proxy
from sites import settled, stored
from sqlalchemy.engine import make_url

from ampwatch import records, spool
from ampwatch.recorder import Harvest, Recorder
from ampwatch.records import Event, pack_events
from ampwatch.settings import Settings
from ampwatch_server.backup import backup


class Rows:
    """A source of attempts, `count` at each harvest until it has given `most`."""

    def __init__(self, most, *, count=5, step=0, time=1.7e9):
        self.given, self.most, self.count, self.step, self.time = 0, most, count, step, time
        self.all_given = threading.Event()

    def harvest(self, final):
        count = min(self.count, self.most - self.given) if not final else self.most - self.given
        attempt = np.arange(self.given, self.given + count)
        self.given += count
        if self.given == self.most:
            self.all_given.set()
        table = {"attempt": attempt, "step": attempt + self.step, "scale": np.full(count, 2.0**16)}
        return Harvest(table | {"time": self.time + attempt, "loss": np.ones(count)} if count else None)


@pytest.fixture
def record(tmp_path, served, request):
    """Makes recorders of the test's own run, into its own folder."""
    run = re.sub(r"\W+", "-", request.node.name)[:100]
    made = []

    def one(*sources, clock=time.time, **given):
        settings = {
            "dir": tmp_path / "runs",
            "run": run,
            "flush_s": 0.02,
            "quiet": True,
            "spool_min_free_bytes": 0,
        }
        server = {"server": served[0].url, "token": served[0].token}
        made.append(Recorder(Settings(**settings | server | given), clock=clock))
        for source in sources:
            made[-1].attach(source)
        made[-1].event("scaler", scaler=0)
        return made[-1]

    one.run = run
    yield one
    for each in made:
        each.finish()


def spooled(folder):
    return {(batch.producer, batch.seq, batch.digest) for batch in spool.read(folder / "runs")}


def shown(served, run):
    """Attempts and gaps of each producer, by its rank, from the oldest on."""
    headers = {"Authorization": f"Bearer {served[0].token}"}
    answer = httpx.get(f"{served[0].url}/v1/runs/{run}", headers=headers)
    producers = answer.json().get("producers", [])
    return [(p["rank"], p["attempts"], p["missing"], p["finished"]) for p in producers]


@pytest.mark.parametrize("trouble", ["cut", "deaf", "slow"])
def test_a_network_that_fails_loses_and_doubles_nothing(trouble, record, served, tmp_path):
    proxy, source = Proxy(urlsplit(served[0].url).port), Rows(200)
    recorder = record(source, server=proxy.url)
    transport = recorder._worker._transport
    assert settled(lambda: transport.delivered > 0, True) is True
    proxy.set(trouble)
    assert source.all_given.wait(60)
    proxy.set("cut")
    proxy.set("pass")
    assert settled(transport._idle, True) is True
    recorder.finish()
    assert settled(lambda: shown(served, record.run), [(0, 200, [], True)]) == [(0, 200, [], True)]
    assert spooled(tmp_path) <= stored(served[1])
    proxy.close()


def test_a_database_that_is_put_back_to_an_older_copy_gets_what_it_has_lost(site, record):
    server = site.serve()
    recorder = record(Rows(2000), server=site.url, token=site.token(), dir=site.runs)
    assert settled(lambda: len(site.stored()) >= 5, True)
    backup(make_url(f"sqlite:///{site.database}"), copy := site.folder / "copy.db")
    has = stored(copy)
    assert settled(lambda: len(site.stored() - has) >= 5, True)
    server.kill()
    for each in site.folder.glob("a.db*"):
        each.unlink()
    copy.rename(site.database)
    site.serve()
    recorder.event("loss_dtype")
    recorder.finish()
    assert settled(lambda: site.stored() == site.spooled() > has, True)


@pytest.mark.parametrize(
    "begin", ["again with an empty spool", "at once on the same rank", "over the same steps"]
)
def test_two_producers_of_one_rank_are_both_kept(begin, record, served, tmp_path):
    first = record(Rows(20))
    if begin == "at once on the same rank":
        second = record(Rows(30))
        first.finish()
    else:
        first.finish()
        shutil.rmtree(tmp_path / "runs")
        second = record(Rows(30, step=10 if begin == "over the same steps" else 0))
    second.finish()
    both = [(0, 20, [], True), (0, 30, [], True)]
    assert settled(lambda: sorted(shown(served, record.run)), both) == both


def test_a_clock_that_steps_back_stops_neither_records_nor_heartbeats(record, served, tmp_path):
    now, source = [2.0e9], Rows(10)
    recorder = record(source, clock=lambda: now[0])
    assert source.all_given.wait(60)
    now[0] -= 1e6
    assert settled(lambda: "heartbeat" in types(tmp_path), True) is True
    recorder.finish()
    assert settled(lambda: shown(served, record.run), [(0, 10, [], True)]) == [(0, 10, [], True)]


def types(folder):
    batches = [batch for batch in spool.read(folder / "runs") if batch.kind == "events"]
    return [event.type for batch in batches for event in batch.events()]


def test_a_poison_batch_is_laid_aside_and_told_of(record, served, tmp_path, monkeypatch, caplog):
    poison, seal = [2], pack_events

    def poisoned(events, **key):
        """One batch of events whose attempt does not fit into 64 bits: a server must refuse it."""
        bad = key["seq"] > 0 and bool(poison) and bool(poison.pop())
        return seal([Event("skip", 1.0, attempt=2**63)] if bad else events, **key)

    monkeypatch.setattr(records, "pack_events", poisoned)
    source = Rows(20)
    recorder = record(source)
    assert source.all_given.wait(60)
    recorder.event("loss_dtype")
    assert settled(lambda: list(tmp_path.glob("runs/*/*/rejected/*-422.awb")) != [], True)
    recorder.event("autocast")
    recorder.finish()
    reasons = [e.data["reason"] for e in dropped(tmp_path)]
    assert reasons == ["refused by the server (422)"]
    assert len(spooled(tmp_path) - stored(served[1])) == 1


def dropped(folder):
    batches = [batch for batch in spool.read(folder / "runs") if batch.kind == "events"]
    return [event for batch in batches for event in batch.events() if event.type == "dropped"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_was_forked_with_every_lock_held_records(record, tmp_path):
    parent = record(Rows(5))
    assert settled(lambda: parent._worker._transport._thread is not None, True)
    with parent._lock, parent._worker._transport._wake:
        if not (child := os.fork()):
            signal.alarm(60)  # a lock that nobody lets go
            parent.event("stream")
            parent.finish()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    parent.finish()
    producers = {batch.producer for batch in spool.read(tmp_path / "runs")}
    assert len(producers) == 2
    assert types(tmp_path).count("finish") == 2


FORKED_BY_A_LIBRARY = """
import ctypes, os, signal
from ampwatch import recorder
job = recorder.current()
job.event("scaler")
job._lock.acquire()
if not (child := ctypes.PyDLL(None).fork()):  # no hook of Python's runs
    signal.alarm(20)
    job.event("stream")
    job.next_attempt()
    recorder.finish()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
job._lock.release()
"""


def test_a_child_that_python_knows_nothing_of_records_nothing_and_does_not_hang(tmp_path):
    environ = os.environ | {"AMPWATCH_DIR": str(tmp_path / "runs"), "AMPWATCH_QUIET": "1"}
    command = [sys.executable, "-c", FORKED_BY_A_LIBRARY]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert types(tmp_path) == ["run", "scaler", "finish"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB; where none may be mounted, a limit on the size of a file does for it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(mount, stderr=subprocess.DEVNULL).returncode
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def free_bytes(folder):
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize


def test_a_full_disk_stops_the_recording_and_nothing_else(record, small_disk, caplog):
    if small_disk is None:
        pytest.xfail(
            "no file system may be mounted here; test_bad_input.py limits the size of a file instead"
        )
    source = Rows(100_000, count=2_000)
    recorder = record(source, server=None, dir=small_disk / "runs")
    assert settled(lambda: "No space left" in caplog.text, True)
    recorder.finish()
    assert caplog.text.count("cannot be written any more: No space left on device") == 1
    assert len(list(spool.read(small_disk / "runs"))) > 0


def test_the_floor_leaves_room_for_a_checkpoint(record, small_disk, caplog):
    if small_disk is None:
        pytest.xfail("no file system may be mounted here; test_room.py has a made-up one")
    source = Rows(100_000, count=2_000)
    recorder = record(source, server=None, dir=small_disk / "runs", spool_min_free_bytes=400_000)
    assert source.all_given.wait(60)
    recorder.finish()
    assert free_bytes(small_disk) >= 400_000
    (small_disk / "checkpoint").write_bytes(bytes(390_000))
    assert caplog.text.count("has too little space left") == 1
    reasons = {
        e.data["reason"]
        for b in spool.read(small_disk / "runs")
        if b.kind == "events"
        for e in b.events()
        if e.type == "dropped"
    }
    assert reasons == {"spool_min_free_bytes"}


QUOTA = """
import errno, os, sys
import numpy as np
from ampwatch import recorder
write = os.write
left = [2000]
def limited(fd, data):
    if fd > 2 and (left := left_of(len(data))) < 0:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    return write(fd, data)
def left_of(size):
    left[0] -= size
    return left[0]
os.write = limited
job = recorder.current()
for i in range(400):
    job.event("skip", attempt=i, loss=float(i))
recorder.finish()
print("trained")
"""


@pytest.mark.parametrize(
    ("script", "said"), [(QUOTA, "Disk quota exceeded"), (QUOTA, "No such file or directory")]
)
def test_a_quota_and_a_working_directory_that_cannot_be_written(script, said, tmp_path):
    cwd = tmp_path if "quota" in said else "/proc"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert [line for line in done.stderr.splitlines() if said in line] == done.stderr.splitlines()
    assert len(done.stderr.splitlines()) == 1


# From SIGTERM to KILL, as schedulers have it; `make soak` takes all of it.
GRACE_S = float(os.environ.get("AMPWATCH_CHAOS_GRACE_S", "2"))

TERMINATED = """
import os, signal, sys, time
import numpy as np
from ampwatch import recorder
from ampwatch.recorder import Harvest

class Rows:
    given = 0
    def harvest(self, final):
        count, self.given = done[0] - self.given, done[0]
        attempt = np.arange(done[0] - count, done[0])
        return Harvest({"attempt": attempt, "scale": np.ones(count), "time": np.full(count, time.time())})

# the user's own: goes on, to write a checkpoint
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"%d\\n" % (done[0] - 1)))
done = [0]
job = recorder.current()
job.attach(Rows())
job.event("scaler")
print("ready", flush=True)
while True:
    done[0] = job.next_attempt() + 1
    time.sleep(0.01)
"""


def test_a_job_that_is_asked_to_end_goes_on_being_recorded_until_it_is_killed(tmp_path):
    environ = os.environ | {"AMPWATCH_DIR": str(tmp_path), "AMPWATCH_FLUSH_S": "0.2"}
    job = subprocess.Popen([sys.executable, "-c", TERMINATED], env=environ, stdout=subprocess.PIPE)
    assert job.stdout.readline() == b"ready\n"
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == b"asked\n"
    asked = len(on_disk(tmp_path))
    time.sleep(GRACE_S)
    last = attempts_done(job)

    def has_all():
        return len(on_disk(tmp_path)) > last  # flush after flush: the thread heeds no signal

    assert settled(has_all, True) is True
    assert last > asked
    assert job.poll() is None  # the handler is the user's
    job.kill()
    job.communicate()
    numbers = on_disk(tmp_path)
    assert numbers == list(range(len(numbers)))


def attempts_done(job):
    """The number of the attempt that the job is at."""
    job.send_signal(signal.SIGUSR1)
    return int(job.stdout.readline())


def on_disk(folder):
    """The numbers of the attempts that a folder holds."""
    tables = [batch.table() for batch in spool.Tail(folder).read() if batch.kind == "attempts"]
    return np.concatenate([table["attempt"] for table in tables]).tolist() if tables else []
