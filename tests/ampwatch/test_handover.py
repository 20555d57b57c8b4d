"""Recorded folders to a server, as `ampwatch sync` does it."""

import gzip
import os
import threading
from collections import Counter

import httpx
import numpy as np
import pytest

from ampwatch import records, spool
from ampwatch.errors import AmpwatchError, RunNotFound, SettingsError
from ampwatch.handover import Handover
from ampwatch.sender import TOGETHER
from ampwatch.spool_writer import SpoolWriter

from .spooled import OTHER, PRODUCER, attempts, events, tensors

SERVER = "http://127.0.0.1:1"


class Store:
    """A server in memory: every batch once, 409 for another body, and whatever it is told to refuse, once or always."""

    def __init__(self):
        self.batches, self.requests, self.status, self.once, self.most_bytes = {}, 0, {}, {}, 1 << 30
        self.came = Counter()
        self._lock = threading.Lock()

    def __call__(self, request):
        with self._lock:
            self.requests += 1
            if len(request.content) > self.most_bytes:
                return httpx.Response(413, json={"detail": "too large"})
            data = gzip.decompress(request.content)
            if request.headers["Content-Type"] != TOGETHER:
                return self._take(records.from_bytes(data))
            answers = [self._take(records.from_bytes(each)) for each in records.split(data)]
        told = [{"status": answer.status_code, "body": answer.json()} for answer in answers]
        return httpx.Response(200, json={"answers": told})

    def _take(self, batch):
        self.came[batch.seq] += 1
        if status := self.once.pop(batch.seq, None) or self.status.get(batch.seq):
            return httpx.Response(status, json={"detail": "no"})
        stored = self.batches.setdefault((batch.producer, batch.seq), batch)
        return httpx.Response(200 if stored == batch else 409, json={"next_batch_s": 60})


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def sync(tmp_path, folder, store):
    """A new process that syncs the folder."""

    def handover(directory=folder, **how):
        http = httpx.MockTransport(store)
        given = {"state_dir": tmp_path / "state", "patience_s": 0, "http": http} | how
        return Handover(directory, SERVER, "secret", **given)

    return handover


def write(folder, *batches, producer=PRODUCER, run="r", **how):
    writer = SpoolWriter(folder, run, producer, max_bytes=1 << 30, **how)
    writer.write(batches)
    return writer


def test_everything_goes_once_and_the_next_time_what_is_new(folder, sync, store):
    writer = write(folder, events(0), attempts(1), tensors(2))
    assert sync().send().stored == 3
    writer.write([attempts(3)])
    assert (sync().send().stored, store.requests) == (1, 2)
    kept = [store.batches[key] for key in sorted(store.batches)]  # eight connections keep no order
    assert kept == [events(0), attempts(1), tensors(2), attempts(3)]
    assert sync(again=True).send().stored == 4
    assert len(store.batches) == 4


def test_what_a_killed_process_held_goes_once_it_is_long_silent(folder, sync, store):
    write(folder, events(0), attempts(1)).hold(events(1, "skip"))
    assert sync().send().stored == 2
    (kept,) = sync().delete().kept.values()
    assert kept == "it holds events that it may still send itself"
    assert [sync(clock=lambda: 1e12).send().stored for _ in range(2)] == [1, 1]  # the same one
    assert sorted(batch.seq for batch in store.batches.values()) == [0, 1, 2]
    handover = sync(clock=lambda: 1e12)
    handover.send()
    assert handover.delete().deleted == [f"r/{PRODUCER}"]


def test_a_run_and_a_producer_can_be_named(folder, sync):
    write(folder, events(0))
    write(folder, events(0, producer=OTHER), producer=OTHER)
    assert sync(folder / "r" / OTHER).send().stored == 1
    assert sync(folder / "r").send().stored == 2


def test_what_a_server_that_is_away_did_not_take_is_sent_the_next_time(folder, sync, store):
    write(folder, *map(attempts, range(600)))
    store.status = {550: 503}
    with pytest.raises(
        AmpwatchError, match=r"answers 503 Service Unavailable.*\. What was sent before is rem"
    ):
        sync().send()
    store.status = {}
    assert sync().send().stored == 600 - 8 * 64  # of the chunk that was broken off
    assert sorted(seq for _, seq in store.batches) == list(range(600))
    assert store.requests == 10 + 2


def test_of_a_request_only_what_must_come_again_does(folder, sync, store):
    write(folder, *map(attempts, range(100)))
    store.once, store.status = {3: 429, 99: 503}, {50: 422}
    report = sync(patience_s=60).send()
    assert (report.stored, report.refused.total(), store.requests) == (99, 1, 4)
    assert {seq: times for seq, times in store.came.items() if times > 1} == {3: 2, 99: 2}


def test_a_server_that_bars_us_is_not_asked_twice(folder, sync, store):
    write(folder, events(0))
    store.status = {0: 401}
    with pytest.raises(AmpwatchError, match="set AMPWATCH_TOKEN"):
        sync(patience_s=60).send()
    assert store.requests == 1


def test_what_is_refused_is_counted_and_keeps_its_producer_from_deletion(folder, sync, store):
    write(folder, events(0), attempts(1), events(2, "finish"))
    store.status = {1: 422}
    report = sync().send()
    assert (report.stored, dict(report.refused)) == (2, {f"{SERVER} refused records: 422 no": 1})
    report = sync().delete()
    assert (report.deleted, list(report.kept.values())) == ([], ["1 of its batches were refused"])


def test_only_with_delete_and_only_what_has_ended_or_is_silent(folder, sync):
    write(folder, events(0), attempts(1), events(2, "finish"))
    write(folder, events(0, producer=OTHER), producer=OTHER)
    handover = sync()
    handover.send()
    assert len(list(spool.read(folder))) == 4
    report = handover.delete()
    assert (report.deleted, list(report.kept)) == ([f"r/{PRODUCER}"], [f"r/{OTHER}"])
    now = max(path.stat().st_mtime for path in folder.rglob("*.awb")) + 600
    assert sync(clock=lambda: now).delete().deleted == [f"r/{OTHER}"]
    assert list(folder.iterdir()) == []


def test_what_was_written_after_the_pass_is_not_deleted(folder, sync):
    writer = write(folder, events(0))
    handover = sync(clock=lambda: 1e12)
    handover.send()
    writer.write([events(1)])
    assert handover.delete().kept == {f"r/{PRODUCER}": "it has written more meanwhile"}


def test_a_job_that_was_only_asleep_writes_on_where_its_folder_was(folder, sync):
    writer = write(folder, events(0))
    handover = sync(clock=lambda: 1e12)
    handover.send()
    assert handover.delete().deleted == [f"r/{PRODUCER}"]
    writer.write([events(1)])
    assert [batch.seq for batch in spool.read(folder)] == [1]


def test_a_record_that_cannot_be_read_is_counted_and_passed_over(folder, sync):
    newer = records.Batch(99, PRODUCER, 0, "r", 0, "events", "", b"")
    write(folder, newer, events(1))
    report = sync().send()
    assert (report.stored, report.unreadable) == (1, 1)


def test_a_producer_of_which_something_cannot_be_read_is_not_deleted(folder, sync):
    newer = records.Batch(99, PRODUCER, 0, "r", 0, "events", "", b"")
    write(folder, newer, events(1, "finish"))
    sync().send()
    report = sync().delete()
    why = "1 of its records cannot be read; a newer ampwatch wrote them, or they are damaged"
    assert (report.deleted, report.kept) == ([], {f"r/{PRODUCER}": why})


def test_a_torn_end_of_a_dead_process_is_no_obstacle(folder, sync):
    write(folder, events(0))
    (path,) = folder.rglob("*.awb")
    path.write_bytes(path.read_bytes() + b"torn")
    handover = sync(clock=lambda: 1e12)
    assert handover.send().stored == 1
    assert handover.delete().deleted == [f"r/{PRODUCER}"]


def test_a_segment_that_is_damaged_in_its_middle_is_not_deleted(folder, sync):
    write(folder, events(0), attempts(1), attempts(2), events(3, "finish"))
    path = next(folder.rglob("attempts-*.awb"))
    path.write_bytes(path.read_bytes().replace(b"scale", b"SCALE", 1))
    handover = sync()
    assert handover.send().stored == 2
    report = handover.delete()
    told = {f"r/{PRODUCER}": "attempts-000000.awb cannot be read to the end"}
    assert (report.deleted, report.kept) == ([], told)


def test_what_is_too_large_goes_in_parts_that_are_the_same_the_next_time(folder, sync, store):
    noise = np.random.default_rng(0).normal(size=1000)
    write(folder, events(0), attempts(1, rows=1000, loss=noise), events(2, "finish"))
    before = sorted(folder.rglob("*"))
    store.most_bytes = 4000
    assert (sync().send().stored, sorted(folder.rglob("*"))) == (3, before)
    first = dict(store.batches)
    tables = [batch.table() for batch in first.values() if batch.kind == "attempts"]
    assert sorted(attempt for table in tables for attempt in table["attempt"].tolist()) == list(range(1000))
    assert sorted(seq for _, seq in first) == list(range(len(first)))  # no gap, none twice
    report = sync(again=True).send()
    assert (report.stored, dict(report.refused), store.batches) == (3, {}, first)
    assert sync().delete().deleted == [f"r/{PRODUCER}"]


def test_a_process_that_still_writes_gives_its_numbers_itself(folder, sync, store):
    write(folder, attempts(0, rows=1000, loss=np.random.default_rng(0).normal(size=1000)))
    store.most_bytes = 4000
    assert sum(sync().send().refused.values()) == 1
    assert sum(sync(again=True, clock=lambda: 1e12).send().refused.values()) == 0  # it is long silent


def test_reading_changes_nothing(folder, sync):
    write(folder, events(0), attempts(1))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*.awb")}
    sync().send()
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*.awb")} == before
    assert {os.path.basename(path) for path in folder.rglob("*") if path.is_dir()} == {"r", PRODUCER}


def test_where_nothing_is_or_may_be_sent(tmp_path, sync):
    with pytest.raises(RunNotFound):
        sync(tmp_path)
    with pytest.raises(SettingsError, match="not https"):
        Handover(tmp_path, "http://10.0.0.1", None)
