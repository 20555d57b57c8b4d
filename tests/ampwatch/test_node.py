"""In a job of many ranks one process of each machine sends for all."""

import os
import shutil
import tempfile

import httpx
import pytest

from ampwatch import spool
from ampwatch.node import Node, local_rank
from ampwatch.recorder import Recorder
from ampwatch.settings import Settings
from ampwatch.spool_writer import SpoolWriter

from .spooled import OTHER, PRODUCER, answered, attempts, events, posted


def writer(folder, producer, run="r"):
    return SpoolWriter(folder, run, producer, max_bytes=1 << 30)


@pytest.fixture
def join(tmp_path):
    def one(producer, *, is_sender=False, **how):
        folder = tmp_path / "runs" / "r" / producer
        return Node("r", producer, folder, is_sender=is_sender, base=tmp_path, **how)

    return one


def test_what_the_others_write_is_handed_on_until_they_have_left(join, tmp_path):
    sender, other, got = join(PRODUCER, is_sender=True), join(OTHER), []
    written = writer(tmp_path / "runs", OTHER)
    written.write([events(0, producer=OTHER)])
    assert sender.forward(lambda batch: not got.append(batch.seq))
    written.write([attempts(1, producer=OTHER)])
    other.leave()
    assert (sender.is_alone, sender.forward(lambda batch: not got.append(batch.seq))) == (False, True)
    assert (got, sender.is_alone) == ([0, 1], True)
    sender.leave()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("ampwatch-")] == []


def test_what_was_not_taken_is_offered_again(join, tmp_path):
    sender, _, got = join(PRODUCER, is_sender=True), join(OTHER), []
    writer(tmp_path / "runs", OTHER).write([events(seq, producer=OTHER) for seq in range(3)])
    assert not sender.forward(lambda batch: batch.seq == 0)
    assert sender.forward(lambda batch: not got.append(batch.seq))
    assert got == [1, 2]


def test_what_a_server_has_lost_is_offered_again(join, tmp_path):
    sender, _, got = join(PRODUCER, is_sender=True), join(OTHER), []
    writer(tmp_path / "runs", OTHER).write([events(0, producer=OTHER)])
    for _ in range(2):
        assert sender.forward(lambda batch: not got.append(batch.seq))
    sender.forward_again(OTHER)
    assert sender.forward(lambda batch: not got.append(batch.seq))
    assert got == [0, 0]


def test_a_mark_that_is_being_written_is_read_the_next_time(join, tmp_path):
    sender, got = join(PRODUCER, is_sender=True), []
    (place,) = (path for path in tmp_path.iterdir() if path.name.startswith("ampwatch-"))
    (place / f"{OTHER}.new").touch()
    assert sender.forward(lambda batch: not got.append(batch.seq))
    join(OTHER)
    writer(tmp_path / "runs", OTHER).write([events(0, producer=OTHER)])
    assert sender.forward(lambda batch: not got.append(batch.seq))
    assert got == [0]


def test_without_a_fresh_sender_nobody_is_served(join):
    now = [1e9]
    other = join(OTHER, clock=lambda: now[0])
    assert other.is_served  # it may not be there yet
    now[0] += 60
    assert not other.is_served
    sender = join(PRODUCER, is_sender=True)
    os.utime(sender._mark, (now[0], now[0]))
    assert other.is_served


def test_a_folder_that_somebody_else_laid_there_is_not_used(join, tmp_path):
    join(PRODUCER)
    (place,) = (path for path in tmp_path.iterdir() if path.name.startswith("ampwatch-"))
    place.chmod(0o777)
    with pytest.raises(PermissionError):
        join(OTHER)


def test_who_clears_the_temporary_folder_breaks_nothing(join, tmp_path):
    sender, other, got = join(PRODUCER, is_sender=True), join(OTHER), []
    writer(tmp_path / "runs", OTHER).write([events(0, producer=OTHER)])
    shutil.rmtree(sender._place)
    for node in (sender, other):
        node.stay()
    assert sender.forward(lambda batch: not got.append(batch.seq))
    assert (got, other.is_served) == ([0], True)


def test_launchers_say_which_process_of_a_machine_it_is():
    given = ({"LOCAL_RANK": "3"}, {"SLURM_LOCALID": "0"}, {"LOCAL_RANK": "many"}, {})
    assert [local_rank(environ) for environ in given] == [3, 0, None, None]


class Counting:
    """A server that notes the ranks whose batches come, and who brings them."""

    def __init__(self):
        self.got = []

    def __call__(self, request):
        batches = posted(request)
        self.got += batches
        return answered(request, *[(200, {"next_batch_s": 0})] * len(batches))


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Makes the recorder of a rank, as one of 128 in a job with two of them on this machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "128")

    def one(number, server, local=None):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number if local is None else local))
        folder = {"dir": tmp_path / "runs", "run": "r", "flush_s": 0.02, "spool_min_free_bytes": 0}
        settings = Settings(server="http://127.0.0.1:1", token="secret", quiet=True, **folder)
        recorder = Recorder(settings, http=httpx.MockTransport(server))
        recorder.event("scaler", scaler=0)
        return recorder

    return one


def test_above_64_ranks_one_process_of_a_machine_sends_for_all(rank, tmp_path):
    servers = Counting(), Counting()
    sender, other = rank(0, servers[0]), rank(1, servers[1])
    other.finish()
    sender.finish()
    assert servers[1].got == []
    assert {(b.producer, b.seq) for b in servers[0].got} == {
        (b.producer, b.seq) for b in spool.read(tmp_path / "runs")
    }
    assert {b.rank for b in servers[0].got} == {0, 1}


def test_what_is_refused_of_another_leaves_a_tombstone_that_names_it(rank, tmp_path):
    def refusing(request):
        is_refused = [batch.rank == 1 and batch.kind == "events" for batch in posted(request)]
        return answered(request, *((422 if refused else 200, {}) for refused in is_refused))

    sender, other = rank(0, refusing), rank(1, refusing)
    other.finish()
    sender.finish()
    batches = list(spool.read(tmp_path / "runs"))
    lost = [e.data for b in batches if b.rank == 0 for e in b.events() if e.type == "dropped"]
    written = [b for b in batches if b.rank == 1]
    assert [(each["producer"], each["first_seq"]) for each in lost] == [(b.producer, b.seq) for b in written]
    assert {each["reason"] for each in lost} == {"refused by the server (422)"}


def test_who_is_not_served_sends_all_of_it_itself(rank, tmp_path, monkeypatch):
    server = Counting()
    alone = rank(1, server)
    monkeypatch.setattr(type(alone._worker._node), "is_served", False)
    alone.event("loss_dtype")
    alone.finish()
    assert sorted({b.seq for b in server.got}) == [b.seq for b in spool.read(tmp_path / "runs")]
