"""What the compactor looks at next. The clock is the test's."""

from __future__ import annotations

import pytest

from ampwatch_server.agenda import MOST_BATCHES, MOST_BYTES, Agenda, Look, New, part


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agenda(clock: Clock) -> Agenda:
    return Agenda(clock)


def calm(producer: int, seq: int = 0, size: int = 10) -> New:
    return New((producer, seq), size)


def urgent(producer: int, seq: int = 0) -> New:
    return New((producer, seq), 10, is_urgent=True)


def test_runs_come_to_their_turn_and_what_came_meanwhile_goes_along(agenda: Agenda) -> None:
    agenda.add({"a": [calm(1, 1)]})
    agenda.add({"b": [calm(2)]})
    agenda.add({"a": [calm(1, 0)]})
    assert agenda.take() == Look("a", [calm(1, 0), calm(1, 1)])
    assert agenda.take() == Look("b", [calm(2)])
    assert agenda.take() is None


def test_looking_rests_twice_as_long_as_it_took(agenda: Agenda, clock: Clock) -> None:
    agenda.add({"a": [calm(1)]})
    agenda.take()
    agenda.done(cpu_s=1.5)
    agenda.add({"b": [calm(2)]})
    clock.now = 102.9
    assert agenda.take() is None
    clock.now = 103.0
    assert agenda.take() == Look("b", [calm(2)])


def test_trouble_jumps_the_queue_with_all_of_its_process_alone(agenda: Agenda, clock: Clock) -> None:
    agenda.add({"a": [calm(1)]})
    agenda.take()
    agenda.done(cpu_s=1.5)
    agenda.add({"a": [calm(1, 1)], "b": [calm(2), calm(3)]})
    agenda.add({"b": [urgent(3, 1)]})
    clock.now = 101.4
    assert agenda.take() is None
    clock.now = 101.5  # after as long as the look took
    assert agenda.take() == Look("b", [calm(3), urgent(3, 1)])  # to be judged, whatever else waits
    agenda.done(cpu_s=0.5)
    clock.now = 102.9
    assert agenda.take() is None
    clock.now = 103.0  # after twice as long as the look before took, whatever came between
    assert agenda.take() == Look("a", [calm(1, 1)])
    assert agenda.take() == Look("b", [calm(2)])


def test_trouble_keeps_the_rest_from_its_turn_for_seconds_only(agenda: Agenda, clock: Clock) -> None:
    agenda.add({"calm": [calm(1)]})
    agenda.take()
    agenda.done(cpu_s=0.1)  # the next is due at 100.2, and overdue at 103.2
    taken = []
    for clock.now in (100.5, 103.1, 103.3, 103.4):
        agenda.add({"calm": [calm(1, int(10 * clock.now))], "bad": [urgent(3, int(10 * clock.now))]})
        look = agenda.take()
        assert look is not None
        agenda.done(cpu_s=0.01)
        taken.append((look.run, len(look.news)))
    assert taken == [("bad", 1), ("bad", 1), ("calm", 3), ("bad", 2)]


def test_a_look_holds_so_many_batches_and_of_the_rest_what_came_first_is_next(agenda: Agenda) -> None:
    first = [calm(1, seq) for seq in range(MOST_BATCHES - 1)]
    agenda.add({"a": [*first, calm(2, 0), calm(2, 1)]})
    assert agenda.take() == Look("a", [*first, calm(2, 0)], is_followed=True)
    agenda.add({"a": [calm(1, 1000)]})
    assert agenda.take() == Look("a", [calm(2, 1), calm(1, 1000)])
    assert agenda.take() is None


@pytest.mark.parametrize(
    ("sizes", "fit"), [([MOST_BYTES + 1, 1], 1), ([1, MOST_BYTES - 1, 1], 2), ([1, MOST_BYTES], 1), ([], 0)]
)
def test_a_look_holds_so_many_bytes_but_one_batch_at_least(sizes: list[int], fit: int) -> None:
    news = [calm(1, seq, size) for seq, size in enumerate(sizes)]
    assert part(news) == (news[:fit], news[fit:])


def test_runs_that_others_know_more_of_are_looked_at_with_what_is_known(agenda: Agenda) -> None:
    agenda.look_at_all(["a", "b"])
    agenda.add({"b": [urgent(1), calm(2)]})
    assert [agenda.take() for _ in range(4)] == [
        Look("b", [urgent(1)]),
        Look("a", [], at_all=True),
        Look("b", [calm(2)], at_all=True),
        None,
    ]


def test_the_lag_is_that_of_the_oldest_news_until_it_was_seen(agenda: Agenda, clock: Clock) -> None:
    assert agenda.lag_s() == 0
    agenda.add({"a": [calm(1)]})
    clock.now = 103.0
    agenda.add({"b": [calm(2)]})
    clock.now = 104.0
    assert agenda.lag_s() == 4
    agenda.take()
    assert agenda.lag_s() == 4  # under way
    agenda.done(cpu_s=0.0)
    assert agenda.lag_s() == 1
