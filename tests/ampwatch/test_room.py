"""How much may still be written."""

import itertools
from collections import namedtuple

import pytest

from ampwatch.room import Left, Room

GIB = 1 << 30
Usage = namedtuple("Usage", "total free")


def room(
    directory, *, max_bytes=100, min_free_bytes=None, total=1000 * GIB, free=900 * GIB, clock=lambda: 0.0
):
    usage = Usage(total, free)
    return Room(directory, max_bytes, min_free_bytes, usage=lambda path: usage, clock=clock)


def put(directory, size, name="attempts-000000.awb"):
    path = directory / "r" / "p" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def test_what_all_runs_take_up_is_bounded(tmp_path):
    put(tmp_path, 30)
    put(tmp_path, 9, "rejected/events-000001-422.awb")
    assert room(tmp_path).left(1) == Left(61, "spool_max_bytes")


@pytest.mark.parametrize(
    ("total", "free", "left"),
    [(100 * GIB, 12 * GIB, 2 * GIB), (1000 * GIB, 51 * GIB, GIB), (100 * GIB, 9 * GIB, -GIB)],
)
def test_the_larger_of_10_gib_and_5_percent_stay_free(tmp_path, total, free, left):
    bound = room(tmp_path, max_bytes=1 << 50, total=total, free=free)
    assert bound.left(1) == Left(left, "spool_min_free_bytes")


def test_the_floor_can_be_set_and_taken_away(tmp_path):
    full = {"max_bytes": 10 * GIB, "free": 7}
    assert room(tmp_path, min_free_bytes=5, **full).left(1) == Left(2, "spool_min_free_bytes")
    assert room(tmp_path, min_free_bytes=0, **full).left(1) == Left(10 * GIB, "spool_max_bytes")


def test_a_file_system_that_does_not_say_has_no_floor(tmp_path):
    def refuse(path):
        raise OSError(38, "Function not implemented")

    assert room(tmp_path, total=0, free=0).left(1) == Left(100, "spool_max_bytes")
    assert Room(tmp_path, 100, None, usage=refuse).left(1) == Left(100, "spool_max_bytes")


def test_other_ranks_are_seen_within_a_minute_and_at_once_where_room_is_short(tmp_path):
    now = [0.0]
    shared = room(tmp_path, clock=lambda: now[0])
    assert shared.left(1).bytes == 100
    shared.take(20)
    put(tmp_path, 70)
    assert shared.left(1).bytes == 80
    assert shared.left(81).bytes == 30
    now[0] = 60.0
    put(tmp_path, 90)
    assert shared.left(1).bytes == 10


def test_a_folder_that_takes_long_to_measure_is_measured_the_more_rarely(tmp_path):
    """Of a clock that moves by 1 s whenever it is read: measuring takes 1 s."""
    now = itertools.count()
    shared = room(tmp_path, clock=lambda: float(next(now)))
    assert shared.left(1).bytes == 100
    put(tmp_path, 70)
    assert shared.left(101).bytes == 100
    assert [next(now) for _ in range(96)][-1] == 99
    assert shared.left(101).bytes == 100
    assert [next(now) for _ in range(3)][-1] == 103
    assert shared.left(101).bytes == 30
