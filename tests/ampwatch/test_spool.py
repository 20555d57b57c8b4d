import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampwatch import records, spool
from ampwatch.cuts import Cuts
from ampwatch.errors import InvalidBatch, RunNotFound, SpoolError
from ampwatch.room import Room
from ampwatch.spool import Tail
from ampwatch.spool_writer import Dropped, SpoolWriter

from .spooled import OTHER, PRODUCER, attempts, events, tensors

Usage = namedtuple("Usage", "total free")


def writer(directory, run="r", producer=PRODUCER, max_bytes=1 << 30, **how):
    return SpoolWriter(directory, run, producer, max_bytes=max_bytes, **how)


def framed_bytes(batch):
    return 8 + len(records.to_bytes(batch))


def names(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*.awb"))


def test_what_is_written_is_read_back_in_order_of_recording(tmp_path):
    batches = [events(0), attempts(1), tensors(2), events(3), attempts(4)]
    assert writer(tmp_path).write(batches) == []
    assert list(spool.read(tmp_path)) == batches


def test_one_file_a_kind_that_only_the_owner_may_read(tmp_path):
    writer(tmp_path).write([events(0), attempts(1), tensors(2)])
    folder = f"r/{PRODUCER}"
    assert names(tmp_path) == [f"{folder}/{kind}-000000.awb" for kind in ("attempts", "events", "tensors")]
    assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*.awb")} == {0o600}


def test_a_flush_is_one_write_for_each_file(tmp_path, monkeypatch):
    written, write = [], os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or write(fd, data))
    batches = [attempts(0), attempts(1), events(2)]
    writer(tmp_path).write(batches)
    assert written == [framed_bytes(batches[2]), framed_bytes(batches[0]) + framed_bytes(batches[1])]


def test_events_that_are_held_are_read_at_the_end_until_they_are_told(tmp_path):
    spooled = writer(tmp_path)
    spooled.write([events(0), attempts(1)])
    for types in (("skip", "backoff"), ("skip",)):  # the longer one first: nothing of it stays readable
        spooled.hold(events(2, *types))
    spooled.write([attempts(2), attempts(3)])
    *_, last = spool.read(tmp_path)
    assert (last.seq, [event.type for event in last.events()]) == (4, ["skip"])
    assert [batch.seq for batch in Tail(tmp_path).read()] == [0, 1, 2, 3]
    spooled.write([events(4, "skip")])
    assert [batch.seq for batch in spool.read(tmp_path)] == [0, 1, 2, 3, 4]


def test_what_is_held_is_numbered_behind_the_parts_of_what_was_cut(tmp_path):
    spooled = writer(tmp_path)
    spooled.write([attempts(0, rows=4)])
    spooled.hold(events(1))
    Cuts(spooled.path, lambda: 1).cut(attempts(0, rows=4))
    assert spool.held(spooled.path).seq == 2


@pytest.mark.parametrize("damage", [b"", b"\1", b"\0" * 8, b"\xff" * 100])
def test_what_is_held_and_cannot_be_read_is_none(damage, tmp_path):
    spooled = writer(tmp_path)
    spooled.write([events(0)])
    (spooled.path / spool.HELD).write_bytes(damage)
    assert [batch.seq for batch in spool.read(tmp_path)] == [0]


def test_a_segment_is_closed_when_it_is_full(tmp_path):
    size = framed_bytes(attempts(0))
    spooled = writer(tmp_path, segment_bytes=2 * size)
    for seq in range(5):
        spooled.write([attempts(seq)])
    assert names(tmp_path) == [f"r/{PRODUCER}/attempts-{i:06d}.awb" for i in range(3)]
    assert [batch.seq for batch in spool.read(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_run_a_producer_and_a_folder_of_runs_can_be_read(tmp_path):
    writer(tmp_path).write([events(0)])
    writer(tmp_path, producer=OTHER).write([events(0, producer=OTHER)])
    writer(tmp_path, run="s").write([events(0, run="s")])
    read = [[(b.run, b.producer) for b in spool.read(tmp_path / path)] for path in ("", "r", f"r/{OTHER}")]
    assert read == [
        [("r", PRODUCER), ("r", OTHER), ("s", PRODUCER)],
        [("r", PRODUCER), ("r", OTHER)],
        [("r", OTHER)],
    ]


def test_the_folders_of_runs_from_the_oldest_on(tmp_path):
    for time, run in enumerate(("c", "a", "b")):
        spooled = writer(tmp_path, run=run)
        spooled.write([events(0, run=run)])
        os.utime(spooled.path, (time, time))
    assert list(spool.run_directories(tmp_path).items()) == [(run, tmp_path / run) for run in "cab"]
    assert spool.run_directories(tmp_path / "a") == {"a": tmp_path / "a"}
    assert spool.run_directories(tmp_path / "a" / PRODUCER) == {"a": tmp_path / "a" / PRODUCER}


def test_a_run_named_like_a_producer_is_still_a_run(tmp_path):
    writer(tmp_path, run=OTHER).write([events(0, run=OTHER)])
    assert spool.run_directories(tmp_path / OTHER) == {OTHER: tmp_path / OTHER}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "runs were recorded in the folders below it; name one: jobs$"),
        ("empty", "no run has been recorded there$"),
        ("nowhere", "there is no such file or folder; a training job records in ampwatch_runs"),
    ],
)
def test_where_nothing_was_recorded_it_is_said_why(tmp_path, path, says):
    writer(tmp_path / "jobs").write([events(0)])
    (tmp_path / "empty").mkdir()
    for read in (spool.run_directories, lambda directory: list(spool.read(directory))):
        with pytest.raises(RunNotFound, match=says):
            read(tmp_path / path)


def test_a_tail_yields_each_batch_once_and_goes_on_from_its_cursor(tmp_path):
    spooled, tail = writer(tmp_path), Tail(tmp_path)
    assert list(tail.read()) == []
    spooled.write([events(0), attempts(1)])
    assert [batch.seq for batch in tail.read()] == [0, 1]
    spooled.write([attempts(2)])
    resumed = Tail(tmp_path, tail.cursor)
    assert [[batch.seq for batch in each.read()] for each in (tail, resumed, tail)] == [[2], [2], []]
    assert tail.cursor == {path: (tmp_path / path).stat().st_size for path in names(tmp_path)}


@pytest.mark.parametrize("cut_bytes", [1, 7, 8, 9, 60])
def test_a_record_that_is_cut_short_is_not_there_yet(tmp_path, cut_bytes):
    writer(tmp_path).write([attempts(0), attempts(1)])
    (path,) = tmp_path.rglob("*.awb")
    whole = path.read_bytes()
    first_bytes = framed_bytes(attempts(0))
    path.write_bytes(whole[: first_bytes + cut_bytes])
    tail = Tail(tmp_path)
    assert [batch.seq for batch in tail.read()] == [0]
    path.write_bytes(whole)
    assert [batch.seq for batch in tail.read()] == [1]


@pytest.mark.parametrize("tail", [bytes(64), b"\xff" * 64])
def test_a_tail_of_rubbish_is_not_there_yet(tmp_path, tail):
    writer(tmp_path).write([events(0)])
    (path,) = tmp_path.rglob("*.awb")
    path.write_bytes(path.read_bytes() + tail)
    assert [batch.seq for batch in spool.read(tmp_path)] == [0]


def test_a_record_that_cannot_be_read_is_raised_once(tmp_path):
    spooled, tail = writer(tmp_path), Tail(tmp_path)
    newer = records.Batch(99, PRODUCER, 0, "r", 0, "events", "", b"")
    spooled.write([newer, events(1)])
    with pytest.raises(InvalidBatch, match="version: got 99"):
        list(tail.read())
    assert [batch.seq for batch in tail.read()] == [1]


def test_reading_changes_nothing(tmp_path):
    writer(tmp_path).write([events(0), attempts(1)])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*.awb")}
    list(spool.read(tmp_path))
    list(Tail(tmp_path).read())
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*.awb")} == before


def test_over_the_bound_the_oldest_tensors_go_first(tmp_path):
    size = framed_bytes(tensors(0))
    spooled = writer(tmp_path, max_bytes=3 * size + 10, segment_bytes=size)
    for seq in range(3):
        spooled.write([tensors(seq)])
    assert spooled.write([events(3)]) == [Dropped("tensors", 0, 0, "spool_max_bytes")]
    assert [batch.seq for batch in spool.read(tmp_path)] == [1, 2, 3]


def test_then_the_oldest_attempts_and_then_new_ones_but_never_events(tmp_path):
    size = framed_bytes(attempts(0))
    spooled = writer(tmp_path, max_bytes=2 * size, segment_bytes=size)
    assert [spooled.write([attempts(seq)]) for seq in range(2)] == [[], []]
    assert spooled.write([attempts(2)]) == [Dropped("attempts", 0, 0, "spool_max_bytes")]
    tight = writer(tmp_path, run="s", max_bytes=1)
    assert tight.write([tensors(0, run="s"), events(1, run="s")]) == [
        Dropped("tensors", 0, 0, "spool_max_bytes")
    ]
    assert [(batch.run, batch.seq) for batch in spool.read(tmp_path)] == [("r", 1), ("r", 2), ("s", 1)]


def test_new_tensors_do_not_push_out_attempts(tmp_path):
    size = framed_bytes(attempts(0))
    spooled = writer(tmp_path, max_bytes=size, segment_bytes=size)
    spooled.write([attempts(0)])
    assert spooled.write([tensors(1)]) == [Dropped("tensors", 1, 1, "spool_max_bytes")]
    assert [batch.seq for batch in spool.read(tmp_path)] == [0]


def test_also_an_open_segment_of_tensors_makes_room_for_attempts(tmp_path):
    spooled = writer(tmp_path, max_bytes=2 * framed_bytes(tensors(0)))
    spooled.write([tensors(0), tensors(1)])
    assert spooled.write([attempts(2)]) == [Dropped("tensors", 0, 1, "spool_max_bytes", 2)]
    assert [batch.seq for batch in spool.read(tmp_path)] == [2]


def test_events_go_last_and_are_counted(tmp_path, monkeypatch):
    size = framed_bytes(events(0))
    over = Room(tmp_path, 0, usage=lambda path: Usage(100 << 30, (10 << 30) + 2 * size))
    spooled = writer(tmp_path, room=over)
    assert [spooled.write([events(seq)]) for seq in range(2)] == [[], []]
    full = writer(tmp_path, run="s", room=Room(tmp_path, 1 << 30, usage=lambda path: Usage(1 << 40, 9 << 30)))
    lost = Dropped("events", 0, 1, "spool_min_free_bytes", 2)
    assert full.write([events(0, run="s"), events(1, run="s")]) == [lost]


def test_what_the_server_has_is_deleted_10_minutes_later_but_events_stay(tmp_path):
    now, size = [0.0], framed_bytes(attempts(0))
    spooled = writer(tmp_path, segment_bytes=size, clock=lambda: now[0])
    for seq in range(0, 9, 3):
        spooled.write([events(seq), attempts(seq + 1), tensors(seq + 2)])
    for now[0], seq, left in ((0, 1, 9), (599, 4, 9), (600, 4, 8), (1199, 8, 6), (1799, 8, 5)):
        spooled.forget(seq)
        assert len(list(spool.read(tmp_path))) == left
    assert [batch.kind for batch in spool.read(tmp_path)] == [
        "events",
        "events",
        "events",
        "attempts",
        "tensors",
    ]


@pytest.mark.parametrize("size", [0, 10])
def test_behind_a_file_that_somebody_cut_nothing_is_written(tmp_path, size):
    spooled = writer(tmp_path)
    spooled.write([attempts(0)])
    os.truncate(tmp_path / "r" / PRODUCER / "attempts-000000.awb", size)
    spooled.write([attempts(1)])
    spooled.write([attempts(2)])
    assert list(spool.read(tmp_path)) == [attempts(1), attempts(2)]


def test_a_folder_that_somebody_deleted_is_made_again(tmp_path):
    spooled = writer(tmp_path)
    spooled.write([events(0), attempts(1)])
    shutil.rmtree(spooled.path)
    spooled.write([events(2), attempts(3)])
    assert [batch.seq for batch in spool.read(tmp_path)] == [2, 3]


def test_what_was_refused_is_laid_aside_and_is_no_part_of_the_record(tmp_path):
    spooled = writer(tmp_path)
    spooled.write([events(0)])
    spooled.reject(events(0), 422)
    assert list(spool.read(tmp_path)) == [events(0)]
    (path,) = tmp_path.glob("*/*/rejected/*")
    assert (path.name, list(spool.read_segment(path))) == ("events-000000-422.awb", [events(0)])


def test_other_runs_count_towards_the_bound_and_are_left_alone(tmp_path):
    writer(tmp_path).write([tensors(0)])
    spooled = writer(tmp_path, run="s", max_bytes=framed_bytes(tensors(0)))
    assert spooled.write([attempts(0, run="s")]) == [Dropped("attempts", 0, 0, "spool_max_bytes")]
    assert [batch.run for batch in spool.read(tmp_path)] == ["r"]


def test_once_old_runs_are_deleted_there_is_room_again(tmp_path):
    writer(tmp_path).write([tensors(0)])
    spooled = writer(tmp_path, run="s", max_bytes=framed_bytes(tensors(0)))
    assert spooled.write([attempts(0, run="s")]) == [Dropped("attempts", 0, 0, "spool_max_bytes")]
    shutil.rmtree(tmp_path / "r")
    seq = 1
    while spooled.write([attempts(seq, run="s")]):  # it is measured again in a moment
        seq += 1
    assert [(batch.run, batch.seq) for batch in spool.read(tmp_path)] == [("s", seq)]


def test_a_full_disk_leaves_nothing_torn(tmp_path, monkeypatch):
    spooled, write = writer(tmp_path), os.write

    def full(fd, data):
        write(fd, data[:20])
        raise OSError(28, "No space left on device")

    spooled.write([attempts(0)])
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        spooled.write([attempts(1)])
    monkeypatch.setattr(os, "write", write)
    spooled.write([attempts(2)])
    assert [batch.seq for batch in spool.read(tmp_path)] == [0, 2]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match=r"file/runs cannot be written: Not a directory"):
        writer(tmp_path / "file" / "runs")


def test_what_a_flush_wrote_outlives_a_killed_process(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from ampwatch import records; from ampwatch.spool_writer import SpoolWriter\n"
        f"spool = SpoolWriter(Path(sys.argv[1]), 'r', {PRODUCER!r}, max_bytes=1 << 30)\n"
        f"spool.write([records.pack_events([], producer={PRODUCER!r}, seq=0, run='r', rank=0)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    assert [batch.seq for batch in spool.read(tmp_path)] == [0]


@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_makes_the_reader_raise_anything_else(tmp_path, data):
    path = tmp_path / "r" / PRODUCER / "events-000000.awb"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = bytearray(b"".join(map(spool.frame, [events(0), events(1)])))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    assert [batch.seq for batch in spool.read(tmp_path)] in ([], [0], [0, 1])
