"""What is done where the spool cannot be written."""

import errno
import os

import pytest

from ampwatch import spool
from ampwatch.keeper import RETRY_S, Keeper
from ampwatch.settings import Settings

from .spooled import PRODUCER, attempts, events, tensors


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def told():
    return []


@pytest.fixture
def keeper(tmp_path, now, told):
    settings = Settings(dir=tmp_path, spool_min_free_bytes=0)
    made = Keeper(settings, "r", PRODUCER, told.append, clock=lambda: now[0])
    made.open()
    return made


def failing(monkeypatch, number):
    def write(fd, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", write)


def kept(tmp_path):
    return [batch.seq for batch in spool.read(tmp_path)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_at_the_first_sign_of_a_full_disk_it_stops_for_good(keeper, number, monkeypatch, tmp_path, now, told):
    assert keeper.write([events(0)]) == {0}
    with monkeypatch.context() as full:
        failing(full, number)
        assert keeper.write([events(1)]) == set()
    now[0] += 1e6
    assert (keeper.write([events(2)]), keeper.is_writing, kept(tmp_path)) == (set(), False, [0])
    assert told == [f"{tmp_path} cannot be written any more: {os.strerror(number)}"]
    assert keeper.part == "up to where writing failed"


def test_a_server_of_files_that_comes_back_is_written_again(keeper, monkeypatch, tmp_path, now, told):
    keeper.write([events(0), attempts(1)])
    with monkeypatch.context() as away:
        failing(away, errno.ESTALE)
        assert keeper.write([attempts(2)]) == set()
    assert keeper.write([attempts(3)]) == set()
    now[0] += RETRY_S
    assert keeper.write([attempts(4), events(5)]) == {4, 5}
    assert kept(tmp_path) == [0, 1, 4, 5]
    assert len(told) == 1


def test_the_floor_is_told_with_what_to_do(tmp_path, told):
    keeper = Keeper(Settings(dir=tmp_path, spool_min_free_bytes=1 << 60), "r", PRODUCER, told.append)
    keeper.open()
    assert [keeper.write([events(seq)]) for seq in range(3)] == [set()] * 3
    (said,) = told
    assert said.startswith(f"the disk of {tmp_path} has too little space left: {1 << 60:,} bytes stay free.")
    assert said.endswith("Make room, or lower AMPWATCH_SPOOL_MIN_FREE_BYTES")
    (lost,) = keeper.lost.take()
    assert lost == ("events", 0, 2, "spool_min_free_bytes", 3)


def test_what_is_lost_adds_up_by_kind_and_reason(keeper):
    keeper.miss([events(3)], "not spooled")
    keeper.miss([events(4), attempts(5)], "not spooled")
    keeper.reject(attempts(9), 422)
    assert keeper.lost.take() == [
        ("events", 3, 4, "not spooled", 2),
        ("attempts", 5, 5, "not spooled", 1),
        ("attempts", 9, 9, "refused by the server (422)", 1),
    ]
    assert not keeper.lost


def test_what_the_server_has_is_not_lost_where_it_makes_room(tmp_path, told):
    size = len(spool.frame(tensors(0)))
    bounds = {"spool_max_bytes": 2 * size + size // 2, "spool_min_free_bytes": 0}
    keeper = Keeper(Settings(dir=tmp_path, **bounds), "r", PRODUCER, told.append)
    keeper.open()
    keeper.write([tensors(0), tensors(1)])
    keeper.forget(1)
    assert keeper.write([tensors(2)]) == {2}
    assert (kept(tmp_path), bool(keeper.lost), told, keeper.part) == ([2], False, [], "")
