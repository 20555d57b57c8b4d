import gc
import logging
import os
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest

import ampwatch
from ampwatch import recorder, spool
from ampwatch.recorder import Harvest, Recorder
from ampwatch.records import Event
from ampwatch.settings import Settings
from ampwatch.transport import Transport

from .spooled import answered, posted


class Rows:
    """A source that gives its harvests in turn, then nothing."""

    def __init__(self, *harvests):
        self.harvests = list(harvests)
        self.asked = threading.Semaphore(0)

    def harvest(self, final):
        self.asked.release()
        return self.harvests.pop(0) if self.harvests else Harvest()

    def wait(self, times):
        """Until it has been asked so often."""
        assert all(self.asked.acquire(timeout=5) for _ in range(times))


def rows(first=0, count=3, skipped=(), scale=2.0**16):
    attempt = np.arange(first, first + count)
    inf = np.isin(attempt, skipped).astype(np.uint8)
    return {
        "attempt": attempt,
        "scale": np.full(count, scale),
        "scale_after": np.where(inf, scale / 2, scale),
        "found_inf": inf,
        "stepped": np.ones(count, dtype=np.int64),
        "skipped": inf.astype(np.int64),
        "loss": np.full(count, 2.0),
    }


@pytest.fixture
def make(tmp_path):
    """Makes recorders into a folder of the test; they are finished at its end."""
    made = []

    def one(*, how=None, **given):
        given = {
            "dir": tmp_path / "runs",
            "run": "r",
            "flush_s": 0.01,
            "quiet": True,
            "spool_min_free_bytes": 0,
        } | given
        made.append(Recorder(Settings(**given), **(how or {})))
        return made[-1]

    yield one
    for each in made:
        each.finish()


def spooled(tmp_path, kind="events"):
    return [batch for batch in spool.read(tmp_path / "runs") if batch.kind == kind]


def events_in(tmp_path):
    return [event for batch in spooled(tmp_path) for event in batch.events()]


def test_the_first_event_describes_the_run_and_the_last_ends_it(make, tmp_path):
    recorder = make(project="p", name="n", tags=("a",), config={"lr": 0.1, "where": tmp_path})
    recorder.describe(device="cpu", statistics="reference")
    recorder.event("scaler", scaler=0)
    recorder.finish()
    run, scaler, finish = events_in(tmp_path)
    assert (run.type, scaler.data) == ("run", {"scaler": 0})
    assert finish.data == {
        "reason": "finish",
        "attempts": 0,
        "taken": 0,
        "skipped": 0,
        "faults": finish.data["faults"],
    }
    expected = {"project": "p", "name": "n", "tags": ["a"], "config": {"lr": 0.1, "where": str(tmp_path)}}
    expected |= {"world_size": 1, "pid": os.getpid(), "device": "cpu", "statistics": "reference"}
    assert {name: run.data[name] for name in expected} == expected
    assert run.data["settings"]["tensor_every"] == 25


def test_a_late_description_is_sent_again(make, tmp_path):
    source = Rows()
    recorder = make()
    recorder.attach(source)
    recorder.event("loss_dtype")
    source.wait(2)
    recorder.describe(device="cpu")
    recorder.finish()
    devices = [event.data["device"] for event in events_in(tmp_path) if event.type == "run"]
    assert devices == ["", "cpu"]


def test_rows_of_a_source_are_spooled_by_kind_under_one_count(make, tmp_path):
    tensors = {"attempt": [0, 0], "tensor": [0, 1], "scale": [1.0, 1.0], "numel": [4, 5]}
    recorder = make()
    recorder.attach(Rows(Harvest(rows(), tensors, [Event("growth", 1.0, attempt=2)])))
    recorder.event("scaler")
    recorder.finish()
    batches = list(spool.read(tmp_path / "runs"))
    assert sorted(batch.seq for batch in batches) == list(range(len(batches)))
    assert {batch.producer for batch in batches} == {recorder.producer}
    assert spooled(tmp_path, "attempts")[0].table()["attempt"].tolist() == [0, 1, 2]
    assert spooled(tmp_path, "tensors")[0].table()["numel"].tolist() == [4, 5]
    assert [event.type for event in events_in(tmp_path)] == ["run", "scaler", "growth", "finish"]


def test_nothing_is_made_before_the_first_event(make, tmp_path):
    recorder = make()
    recorder.describe(device="cpu")
    recorder.log(loss=1.0)
    recorder.finish()
    assert not (tmp_path / "runs").exists()


def test_a_flush_needs_no_call(make, tmp_path):
    source = Rows(Harvest(rows()))
    recorder = make()
    recorder.attach(source)
    recorder.next_attempt()
    source.wait(3)
    assert len(spooled(tmp_path, "attempts")[0].table()["attempt"]) == 3


def test_the_end_counts_what_was_taken_and_skipped(make, tmp_path):
    source = Rows(Harvest(rows(0, 3, skipped=[0])), Harvest(rows(3, 4, skipped=[4, 5])))
    recorder = make()
    recorder.attach(source)
    recorder.event("scaler")
    source.wait(2)
    recorder.finish()
    end = events_in(tmp_path)[-1]
    assert (end.data["attempts"], end.data["taken"], end.data["skipped"]) == (7, 4, 3)


def test_attempts_are_counted_over_all_who_ask(make):
    recorder = make()
    assert [recorder.next_attempt() for _ in range(3)] == [0, 1, 2]


def test_a_source_that_has_more_is_asked_again_in_the_same_flush(make, tmp_path):
    tensors = {"tensor": np.zeros(1), "scale": np.ones(1), "numel": np.ones(1)}
    portions = [
        Harvest(tensors=tensors | {"attempt": np.array([number])}, has_more=number < 4) for number in range(5)
    ]
    recorder = make(flush_s=60.0)
    recorder.attach(Rows(*portions))
    recorder.event("scaler")
    recorder.finish()
    given = [batch.table()["attempt"].tolist() for batch in spooled(tmp_path, "tensors")]
    assert given == [[0], [1], [2], [3], [4]]
    assert [event.type for event in events_in(tmp_path)] == ["run", "scaler", "finish"]


def test_a_large_table_leaves_in_parts(make, tmp_path):
    count = 20_000  # rows of 64 bins of 8 bytes: 10 MB
    table = {
        "attempt": np.arange(count),
        "tensor": np.zeros(count),
        "scale": np.ones(count),
        "numel": np.ones(count),
    }
    recorder = make()
    recorder.attach(Rows(Harvest(tensors=table | {"hist": np.zeros((count, 64), dtype=np.int64)})))
    recorder.event("scaler")
    recorder.finish()
    parts = [batch.table()["attempt"] for batch in spooled(tmp_path, "tensors")]
    assert len(parts) == 21
    assert max(len(batch.body) for batch in spooled(tmp_path, "tensors")) <= 513 << 10
    assert np.concatenate(parts).tolist() == list(range(count))


def test_what_is_logged_goes_into_the_logbook_of_the_recorder(make):
    recorder = make()
    recorder.log(step=7, loss=1.5, reward=2)
    recorder.log(epoch=1, loss=2.5)
    assert recorder.logbook.end().close() == {"step": 7, "loss": 2.5, "reward": 2.0, "epoch": 1.0}


def test_what_cannot_be_recorded_does_not_raise(make, tmp_path, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    recorder = make()
    recorder.event("scaler", what=object())
    recorder.finish()
    faults = [event.data["where"] for event in events_in(tmp_path) if event.type == "fault"]
    assert faults == ["recorder.event"]


def test_a_source_that_fails_stops_nothing_else(make, tmp_path, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    class Broken:
        def harvest(self, final):
            raise ZeroDivisionError("ours")

    recorder = make()
    recorder.attach(Broken())
    recorder.attach(Rows(Harvest(rows())))
    recorder.event("scaler")
    recorder.finish()
    assert len(spooled(tmp_path, "attempts")) == 1


def test_a_source_is_let_go_after_its_last_harvest(make, tmp_path):
    closed, other = Rows(Harvest(rows()), Harvest(rows(3), is_last=True), Harvest(rows(6))), Rows()
    recorder = make()
    recorder.attach(closed)
    recorder.attach(other)
    recorder.event("scaler")
    other.wait(4)
    recorder.finish()
    assert recorder._sources == [other]
    assert [batch.table()["attempt"][0] for batch in spooled(tmp_path, "attempts")] == [0, 3]


def test_scalers_that_are_gone_leave_nothing_to_harvest(make):
    source, recorder = Rows(), make()
    for _ in range(3):
        ampwatch.GradScaler("cpu", recorder=recorder)
    recorder.attach(source)
    recorder.event("scaler")
    gc.collect()
    source.asked = threading.Semaphore(0)
    source.wait(2)
    assert recorder._sources == [source]


def test_a_folder_that_cannot_be_written_gives_one_warning(make, tmp_path, caplog):
    (tmp_path / "file").touch()
    recorder = make(dir=tmp_path / "file")
    recorder.attach(Rows(Harvest(rows())))
    recorder.event("scaler")
    recorder.finish()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    why = "cannot be written: Not a directory. Training goes on, but nothing more of it is kept"
    assert warnings == [f"ampwatch: {tmp_path / 'file'} {why}"]


def test_a_full_disk_gives_one_warning_and_the_server_gets_the_rest(make, tmp_path, caplog, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    got = []
    monkeypatch.setattr(os, "write", full)
    recorder = make(
        server="http://127.0.0.1:1",
        how={"http": httpx.MockTransport(lambda r: got.extend(posted(r)) or ok(r))},
    )
    source = Rows(Harvest(rows()), Harvest(rows(3)))
    recorder.attach(source)
    recorder.event("scaler")
    source.wait(2)
    recorder.finish()
    where = "cannot be written any more: No space left on device. Training goes on, and the records go to the server only"
    assert caplog.text.count(where) == 1
    kinds = [batch.kind for batch in got]
    assert (kinds[:2], kinds.count("attempts")) == (["events", "attempts"], 2)


def test_a_folder_full_of_old_runs_gives_one_warning_and_the_log_says_so(make, tmp_path, caplog, capsys):
    folder = tmp_path / "runs"
    old = make(run="old")
    old.event("scaler")
    old.finish()
    source = Rows(Harvest(rows()), Harvest(rows(3)))
    recorder = make(spool_max_bytes=1, quiet=False)
    recorder.attach(source)
    recorder.event("scaler")
    source.wait(3)
    recorder.finish()
    (warning,) = caplog.messages
    assert warning.startswith(
        f"ampwatch: {folder} is full: all runs there together may take 1 bytes. Of this run"
    )
    assert (
        "Delete the folders of old runs in it, or raise AMPWATCH_SPOOL_MAX_BYTES. Training goes on" in warning
    )
    last = f"ampwatch: to see it, as far as AMPWATCH_SPOOL_MAX_BYTES left room: ampwatch serve {folder}"
    assert capsys.readouterr().err.splitlines()[-1] == last
    dropped = [event.data["kind"] for event in events_in(tmp_path) if event.type == "dropped"]
    assert dropped == ["attempts", "attempts"]


def test_what_neither_disk_nor_server_took_is_recorded_as_lost(make, tmp_path, monkeypatch):
    monkeypatch.setattr(Transport, "submit", lambda self, batch, **how: batch.kind == "events")
    recorder = make(server="http://127.0.0.1:1", spool_max_bytes=1)
    recorder.attach(Rows(Harvest(rows())))
    recorder.event("scaler")
    recorder.finish()
    reasons = [event.data["reason"] for event in events_in(tmp_path) if event.type == "dropped"]
    assert reasons == ["spool_max_bytes"]


def test_what_is_lost_for_good_is_not_waited_for_at_the_end(make, tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(Transport.__init__.__kwdefaults__, "queue_bytes", 0)
    (tmp_path / "file").touch()
    http = httpx.MockTransport(ok)
    recorder = make(dir=tmp_path / "file", server="http://127.0.0.1:1", how={"http": http})
    recorder.event("scaler")
    recorder.finish()
    (warning,) = caplog.messages
    assert warning.endswith("Training goes on, and the records go to the server only")


def ok(request):
    return answered(request, *[(200, {"next_batch_s": 0})] * len(posted(request)))


def test_the_server_gets_what_the_spool_holds(make, tmp_path):
    got = []
    recorder = make(
        server="http://127.0.0.1:1",
        how={"http": httpx.MockTransport(lambda r: got.extend(posted(r)) or ok(r))},
    )
    recorder.attach(Rows(Harvest(rows())))
    recorder.event("scaler")
    recorder.finish()
    assert got == list(spool.read(tmp_path / "runs"))


def test_a_server_that_nothing_may_be_sent_to_leaves_the_spool(make, tmp_path, caplog, capsys):
    recorder = make(server="http://no-such-host.invalid", token="secret", quiet=False)
    recorder.attach(Rows(Harvest(rows())))
    recorder.event("scaler")
    recorder.finish()
    assert [event.type for event in events_in(tmp_path)] == ["run", "scaler", "finish"]
    assert (
        capsys.readouterr().err.splitlines()[-1] == f"ampwatch: to see it: ampwatch serve {tmp_path / 'runs'}"
    )
    assert caplog.text.count("nothing is sent") == 1


def test_the_log_names_the_page_of_the_run(make, capsys):
    http = httpx.MockTransport(ok)
    recorder = make(server="http://127.0.0.1:1/base/", quiet=False, how={"http": http})
    recorder.attach(Rows(Harvest(rows())))
    recorder.event("scaler")
    recorder.finish()
    assert capsys.readouterr().err.splitlines()[-1] == "ampwatch: to see it: http://127.0.0.1:1/base/run/r"


def test_a_heartbeat_where_nothing_else_is_said(make, tmp_path):
    now = [100.0]
    source = Rows()
    recorder = make(how={"clock": lambda: now[0]})
    recorder.attach(source)
    recorder.event("scaler")
    while not list((tmp_path / "runs").rglob("*.awb")):
        source.wait(1)
    now[0] += 10.0
    source.wait(3)
    assert [(event.type, event.time) for event in events_in(tmp_path)][2:] == [("heartbeat", 110.0)]


def test_what_comes_after_the_end_is_not_recorded(make, tmp_path):
    recorder = make()
    recorder.event("scaler")
    recorder.finish()
    recorder.event("stream")
    recorder.finish()
    assert [event.type for event in events_in(tmp_path)] == ["run", "scaler", "finish"]


def test_switched_off_it_records_nothing(make, tmp_path):
    recorder = make(enabled=False)
    recorder.event("scaler")
    assert recorder.next_attempt() == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_that_records_is_another_producer(make, tmp_path):
    parent = make()
    parent.attach(Rows(Harvest(rows())))
    parent.event("scaler")
    if (child := os.fork()) == 0:
        is_empty = parent._sources == []  # their locks may be held by threads that are not here
        parent.event("stream")
        parent.finish()
        os._exit(0 if is_empty else 1)
    assert os.waitpid(child, 0)[1] == 0
    parent.finish()
    producers = {batch.producer for batch in spool.read(tmp_path / "runs")}
    assert len(producers) == 2
    (other,) = producers - {parent.producer}
    types = [e.type for b in spool.read(tmp_path / "runs") if b.producer == other for e in b.events()]
    assert types == ["run", "stream", "finish"]


def test_the_verdict_is_three_lines_in_the_jobs_log(make, tmp_path, capsys):
    recorder = make(quiet=False)
    recorder.attach(Rows(Harvest(rows(0, 4, skipped=[0]))))
    recorder.event("scaler")
    recorder.finish()
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("ampwatch: healthy: 3 steps taken, 1 skipped")
    assert second == "ampwatch: loss 2 → 2"
    assert third == f"ampwatch: to see it: ampwatch serve {tmp_path / 'runs'}"


def test_a_fatal_finding_is_said_once_and_the_job_is_told(make, capsys):
    told = []
    failing = Harvest(rows(0, 12, skipped=range(12)) | {"loss": np.full(12, np.nan)})
    source = Rows(failing)
    recorder = make(quiet=False, how={"on_finding": told.append})
    recorder.attach(source)
    recorder.event("scaler")
    source.wait(4)
    recorder.finish()
    lines = capsys.readouterr().err.splitlines()
    assert {finding.severity for finding in told} == {"fatal"}
    assert lines[: len(told)] == [f"ampwatch: fatal: {finding.headline}" for finding in told]
    assert lines[len(told)].startswith("ampwatch: failing: ")


def test_a_listener_may_finish_the_run(make):
    finished = threading.Event()
    recorder = make(how={"on_finding": lambda finding: (recorder.finish(), finished.set())})
    recorder.attach(Rows(Harvest(rows(0, 12, skipped=range(12)) | {"loss": np.full(12, np.nan)})))
    recorder.event("scaler")
    assert finished.wait(5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A process without current recorders, that records into the test's folder."""
    monkeypatch.setenv("AMPWATCH_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("AMPWATCH_QUIET", "1")
    recorder.finish()
    yield tmp_path
    recorder.finish()


def test_scalers_of_a_process_share_the_recorder(folder):
    first = recorder.current()
    assert recorder.current() is first
    named = recorder.current(Settings.load(run="named"))
    assert named is not first
    assert recorder.current(Settings.load(run="named")) is named
    assert recorder.current(Settings.load(run=first.run)) is first


def test_after_finish_a_new_run_begins(folder):
    first = recorder.current()
    recorder.finish()
    assert recorder.current().run != first.run


def test_log_reaches_the_run_that_was_begun_last(folder):
    recorder.log(loss=1.0)
    begun = recorder.current()
    recorder.log(loss=2.0, step=3)
    assert begun.logbook.end().close() == {"loss": 2.0, "step": 3}


def test_a_second_listener_is_told_too(folder):
    begun, heard = recorder.current(on_finding=print), []
    assert recorder.current(on_finding=heard.append) is begun
    assert begun._listeners == [print, heard.append]


def test_the_end_of_the_interpreter_ends_the_run(tmp_path):
    script = "from ampwatch import recorder; recorder.current().event('scaler')"
    environ = os.environ | {"AMPWATCH_DIR": str(tmp_path / "runs")}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=True)
    assert done.stderr == b""
    assert events_in(tmp_path)[-1].data["reason"] == "exit"


def skips(attempt):
    """A harvest of one more attempt that is skipped like the others."""
    data = {"scale": 0.0, "loss": float("nan")}
    return Harvest(rows(attempt, 1, [attempt], 0.0), None, [Event("skip", 1.0, attempt, 3, 0, data=data)])


def test_events_that_wait_are_on_the_disk(make, tmp_path):
    source, recorder = Rows(*map(skips, range(40))), make()
    recorder.attach(source)
    recorder.event("scaler", scaler=0)
    source.wait(41)
    on_disk = [(e.attempt, e.repeat) for e in events_in(tmp_path) if e.type == "skip"]  # as if killed now
    recorder.finish()
    assert on_disk == [(0, 1), (1, 39)]


def test_events_that_go_on_over_flushes_are_few(make, tmp_path):
    source, recorder = Rows(*map(skips, range(40))), make()
    recorder.attach(source)
    recorder.event("scaler", scaler=0)
    source.wait(41)
    recorder.finish()
    assert len(spooled(tmp_path, "attempts")) == 40
    told = [(event.attempt, event.repeat) for event in events_in(tmp_path) if event.type == "skip"]
    assert told == [(0, 1), (1, 39)]
