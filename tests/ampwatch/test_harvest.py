"""From numbers to rows: by hand, in order, late, and where the recorder does not keep pace."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import pytest

from ampwatch.autopsy import Wanted
from ampwatch.harvest import MOST_WANTED, Harvester, Rows, Seen
from ampwatch.logbook import Entry
from ampwatch.outcome import Attempt, Unscaled
from ampwatch.records import is_missing
from ampwatch.stats.layout import SCALARS, WIDTH


class Arriving:
    """A ring whose vectors arrive when the test says so."""

    def __init__(self):
        self.under_way = deque()
        self.arrived = self.shown = 0

    def send(self, label, numbers, *, arrives=True):
        self.under_way.append((label, np.asarray(numbers, np.float64)))
        self.arrived += arrives

    def __len__(self):
        return len(self.under_way)

    def arrivals(self):
        new, self.shown = list(self.under_way)[self.shown : self.arrived], self.arrived
        return new

    def receive(self):
        while self.arrived:
            self.arrived, self.shown = self.arrived - 1, max(0, self.shown - 1)
            yield self.under_way.popleft()


@pytest.fixture
def ring():
    return Arriving()


def listening(ring, **arguments):
    harvester = Harvester(tensor_every=25, **arguments)
    harvester.listen(ring)
    return harvester


@pytest.fixture
def harvester(ring):
    return listening(ring)


def attempt(number, *, tensors=(0,), stepped=(0,), is_open=False, **known):
    logged = Entry()
    if not is_open:
        logged.close()
    unscaled = [Unscaled(0, np.array(tensors, np.int64), fused=False)]
    return Attempt(
        attempt=number, scaler=0, time=1.0, order=["scale", "step:0", "update"], losses=1, has_loss=True,
        stepped=list(stepped), found=[0], unscaled=unscaled, manual=False, logged=logged, **({"stream": 0} | known),
    )  # fmt: skip


def numbers(*rows, scale=4.0, after=4.0, loss=1.0, found=0.0):
    return [scale, after, 0, loss, found, *(value for row in rows for value in row)]


def row(**statistics):
    """The statistics of a tensor without its histogram, zero where they are not given."""
    return [statistics.get(name, 0.0) for name in SCALARS]


def send_wanted(harvester, ring):
    """As a watch does after every attempt: the statistics that are asked for, here zeros. Answers whose they are."""
    wanted = list(iter(harvester.next_wanted, None))
    for each in wanted:
        ring.send(Rows(each), [0.0] * WIDTH * len(each.ids))
    return [each.attempt.attempt for each in wanted]


def test_totals_over_tensors(harvester, ring):
    tensors = (
        row(numel=4, n_zero=1, max_abs=8, sum_sq=64),
        row(numel=6, n_zero=2, n_below=1, max_abs=4, sum_sq=80),
    )
    ring.send(attempt(0, tensors=(0, 1)), numbers(*tensors))
    table = harvester.harvest(final=True).attempts
    names = ("numel", "n_zero", "n_below", "max_abs", "norm")
    assert [table[name].tolist() for name in names] == [[10], [3], [1], [8.0], [3.0]]


def test_headroom_is_that_of_tensors_born_in_float16(harvester, ring):
    origins = {"0": "unknown", "1": "float16"}
    ring.send(Seen("origin", lambda _: {"origins": origins}, 0, 0, 1.0), [])
    ring.send(attempt(0, tensors=(0, 1)), numbers(row(max_abs=60000), row(max_abs=65504 / 8)))
    assert harvester.harvest(final=True).attempts["headroom_log2"].tolist() == [3.0]


def test_no_gradient_at_all_has_no_norm(harvester, ring):
    ring.send(attempt(0, tensors=()), numbers())
    table = harvester.harvest(final=True).attempts
    assert (table["numel"].tolist(), is_missing(table["norm"]).tolist()) == ([0], [True])


def test_only_what_has_arrived_is_harvested(harvester, ring):
    ring.send(attempt(0), numbers(row()))
    ring.send(attempt(1), numbers(row()), arrives=False)
    assert harvester.harvest(final=False).attempts["attempt"].tolist() == [0]
    ring.arrived = 1
    assert harvester.harvest(final=False).attempts["attempt"].tolist() == [1]


def test_the_end_waits_a_bounded_time(ring):
    harvester = listening(ring, drain_s=0.01)
    ring.send(attempt(0), numbers(row()), arrives=False)
    assert harvester.harvest(final=True).attempts is None


def test_the_training_thread_never_waits_for_the_recorder(harvester, ring):
    ring.send(attempt(0), numbers(row()))
    with harvester._lock:
        training = threading.Thread(target=harvester.advance)
        training.start()
        training.join(timeout=10)
        assert not training.is_alive()
    assert harvester.harvest(final=False).attempts["attempt"].tolist() == [0]


def dropped(harvested):
    return [event.data for event in harvested.events if event.type == "dropped"]


def lost(kind, first, last, count):
    number = {"first_seq": -1, "last_seq": -1, "reason": "the recorder did not keep pace"}
    return {"kind": kind, "first_attempt": first, "last_attempt": last, "count": count} | number


LATER = 64  # attempts whose statistics are wanted from the first on


@pytest.fixture
def later(harvester, ring):
    """Sends the attempts after the first ones; answers how many wait for each other after each."""

    def send(*its_numbers):
        waiting = []
        for i, each in enumerate(its_numbers):
            tensors = range((len(each) - 5) // len(SCALARS))
            ring.send(attempt(LATER + i, tensors=tensors), each)
            harvester.advance(together=8)
            waiting.append(len(ring))
        return waiting

    for i in range(LATER):
        ring.send(attempt(i), numbers(row(sum_sq=16.0)))
        harvester.advance(together=8)
        assert len(ring) == 0
    return send


USUAL = numbers(row(sum_sq=16.0))


def test_ordinary_attempts_wait_for_each_other(later):
    assert later(*[USUAL] * 9) == [1, 2, 3, 4, 5, 6, 7, 0, 1]


@pytest.mark.parametrize(
    "news",
    [
        numbers(row(sum_sq=16.0), found=1.0),
        numbers(row(sum_sq=16.0), loss=np.nan),
        numbers(row(sum_sq=16.0), loss=4.1),
        numbers(row(n_inf=1.0)),
        numbers(row(), row(n_nan=2.0)),
        numbers(row(sum_sq=16.0 * 4.1**2)),
        numbers(row(sum_sq=16.0 / 8.1**2)),
    ],
)
def test_one_that_may_be_followed_waits_for_none(later, news):
    assert later(USUAL, USUAL, news) == [1, 2, 0]


def test_neither_does_one_whose_statistics_are_wanted_anyway(later, ring):
    assert later(*[USUAL] * 12) == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0]  # the 75th
    assert later(numbers(row(n_inf=1.0), found=1.0), *[USUAL] * 5) == [0, 0, 0, 0, 0, 1]  # those after a skip


def test_neither_does_what_observers_saw(later, harvester, ring):
    assert later(USUAL) == [1]
    ring.send(Seen("origin", lambda _: {"origins": {}}, LATER, 0, 1.0), [])
    harvester.advance(together=8)
    assert len(ring) == 0


def test_a_slow_recorder_loses_tensor_rows_and_no_attempt(ring):
    harvester = listening(ring, most_tensor_bytes=2 * WIDTH * 8)
    for i in range(5):
        ring.send(attempt(i), numbers(row(numel=1)))
        harvester.advance()
        send_wanted(harvester, ring)
    harvested = harvester.harvest(final=True)
    assert harvested.attempts["attempt"].tolist() == [0, 1, 2, 3, 4]
    assert harvested.tensors["attempt"].tolist() == [3, 4]
    assert dropped(harvested) == [lost("tensors", 0, 2, 3)]


def test_a_recorder_that_stands_still_loses_the_oldest_attempts_and_events_and_says_so(ring):
    harvester = listening(ring, most_rows=3, most_events=2)
    for i in range(10):
        ring.send(attempt(i), numbers(row(), found=1.0))
    harvested = harvester.harvest(final=True)
    assert harvested.attempts["attempt"].tolist() == [7, 8, 9]
    assert [(e.type, e.attempt) for e in harvested.events[:2]] == [("skip", 8), ("skip", 9)]
    assert dropped(harvested) == [lost("attempts", 0, 6, 7), lost("events", 0, 7, 10)]
    ring.send(attempt(10), numbers(row()))
    assert dropped(harvester.harvest(final=True)) == []


def test_the_newest_attempt_is_open_for_a_moment(ring):
    now = [100.0]
    harvester = listening(ring, clock=lambda: now[0])
    first, second = attempt(0, is_open=True), attempt(1, is_open=True)
    for each in (first, second):
        ring.send(each, numbers(row()))
    assert harvester.harvest(final=False).attempts["attempt"].tolist() == [0]
    second.logged.put("step", 7)
    second.logged.put("reward", 0.5)
    assert harvester.harvest(final=False).attempts is None
    now[0] += 0.25
    table = harvester.harvest(final=False).attempts
    assert (table["step"].tolist(), table["log.reward"].tolist(), harvester.step) == ([7], [0.5], 8)
    assert not second.logged.put("late", 1.0)


def test_steps_count_what_was_taken(harvester, ring):
    for i, found in enumerate((0.0, 1.0, 0.0)):
        ring.send(attempt(i), numbers(row(), found=found))
    assert harvester.harvest(final=False).attempts["step"].tolist() == [0, 1, 1]
    assert harvester.step == 2


def test_statistics_come_where_they_are_wanted_and_each_once(harvester, ring):
    ring.send(attempt(0, tensors=(3, 5)), numbers(row(), row()))
    harvester.advance()
    assert (send_wanted(harvester, ring), send_wanted(harvester, ring)) == ([0], [])
    table = harvester.harvest(final=False).tensors
    assert (table["attempt"].tolist(), table["tensor"].tolist()) == ([0, 0], [3, 5])
    assert table["hist"].shape == (2, 64)


def test_many_statistics_come_in_portions_and_the_last_says_that_it_is(harvester, ring):
    known = attempt(7, tensors=range(300))
    for number in range(5):  # of 173 KiB each
        wanted = Wanted(known, float(number), np.arange(300), None)
        ring.send(Rows(wanted), np.zeros(300 * WIDTH))
    harvester.close()
    portions = [harvester.harvest(final=True) for _ in range(3)]
    scales = [sorted(set(portion.tensors["scale"].tolist())) for portion in portions]
    assert scales == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    assert [portion.has_more for portion in portions] == [True, True, False]
    assert [portion.is_last for portion in portions] == [False, False, True]


def test_of_an_attempt_wanted_in_part_the_other_tensors_are_left_out(harvester, ring):
    known = attempt(7, tensors=(3, 5, 9))
    ring.send(Rows(Wanted(known, 4.0, np.array([3, 5, 9]), np.array([5]))), np.arange(3.0 * WIDTH))
    table = harvester.harvest(final=False).tensors
    assert (table["tensor"].tolist(), table["numel"].tolist(), table["scale"].tolist()) == (
        [5],
        [WIDTH],
        [4.0],
    )


def test_non_finite_tensors_are_listed_up_to_sixteen(harvester, ring):
    ring.send(attempt(0, tensors=range(20)), numbers(*[row(n_inf=1)] * 20, found=1.0))
    (skip,) = [event.data for event in harvester.harvest(final=False).events if event.type == "skip"]
    assert (skip["tensors"], skip["count"]) == (list(range(16)), 20)


def test_a_closed_harvester_lets_its_ring_go_once_it_is_empty(harvester, ring):
    ring.send(attempt(0), numbers(row()))
    harvester.close()
    assert harvester.harvest(final=False).attempts["attempt"].tolist() == [0]
    assert harvester._ring is None


def test_the_last_harvest_says_so(harvester, ring):
    ring.send(attempt(0, is_open=True), numbers(row()))
    assert not harvester.harvest(final=False).is_last
    ring.send(attempt(1), numbers(row()), arrives=False)
    harvester.close()
    assert not harvester.harvest(final=False).is_last
    ring.arrived = 1
    last = harvester.harvest(final=False)
    assert (last.attempts["attempt"].tolist(), last.is_last) == ([0, 1], True)


def test_what_nobody_takes_is_forgotten(ring):
    harvester = Harvester(tensor_every=1)
    harvester.listen(ring)
    for number in range(MOST_WANTED + 8):
        ring.send(attempt(number, tensors=(3,)), numbers(row()))
        harvester.advance()
    assert harvester.next_wanted().attempt.attempt == 8


def following(before, ring):
    harvester = listening(ring)
    harvester.follow(before.steps)
    return harvester


def sent(harvester, ring, *attempts, arrives=True):
    """As a watch sends."""
    for number in attempts:
        ring.send(attempt(number), numbers(row()), arrives=arrives)
        harvester.steps.sent = number


def test_one_that_follows_waits_for_what_the_one_before_has_under_way(harvester, ring):
    sent(harvester, ring, 0)
    sent(harvester, ring, 1, arrives=False)
    its = Arriving()
    after = following(harvester, its)
    sent(harvester, ring, 2, arrives=False)
    sent(after, its, 3)
    after.advance()
    assert (after.harvest(final=False).attempts, after.step) == (None, 0)
    ring.arrived = 1
    after.advance()
    assert after.harvest(final=False).attempts["step"].tolist() == [2]
    ring.arrived = 1
    assert harvester.harvest(final=False).attempts["step"].tolist() == [0, 1, 2]


def test_the_training_thread_does_not_wait_for_the_recorder_at_the_one_before_either(harvester, ring):
    sent(harvester, ring, 0)
    its = Arriving()
    after = following(harvester, its)
    sent(after, its, 1)
    with harvester._lock:
        training = threading.Thread(target=after.advance)
        training.start()
        training.join(timeout=10)
        assert not training.is_alive()
    assert after.harvest(final=False).attempts["step"].tolist() == [1]


def test_one_that_follows_keeps_none_alive(ring):
    before = listening(ring)
    sent(before, ring, 0, 1)
    before.harvest(final=False)
    its = Arriving()
    after, gone = following(before, its), weakref.ref(before)
    del before
    sent(after, its, 2)
    assert gone() is None
    assert after.harvest(final=False).attempts["step"].tolist() == [2]


def test_one_without_an_attempt_hands_on_what_it_followed(harvester, ring):
    sent(harvester, ring, 0)
    sent(harvester, ring, 1, arrives=False)
    idle = following(harvester, Arriving())
    idle.close()
    its = Arriving()
    last = following(idle, its)
    sent(last, its, 2)
    assert last.harvest(final=False).attempts is None
    assert not idle.harvest(final=False).is_last
    ring.arrived = 1
    assert last.harvest(final=False).attempts["step"].tolist() == [2]
    assert idle.harvest(final=False).is_last


def test_an_attempt_that_is_lost_is_not_waited_for(harvester, ring):
    sent(harvester, ring, 0)
    harvester.steps.sent = 1
    its = Arriving()
    after = following(harvester, its)
    sent(after, its, 2)
    assert after.harvest(final=False).attempts["step"].tolist() == [1]
