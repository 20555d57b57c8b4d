"""Events alike at consecutive attempts, as one that says how often."""

from hypothesis import given
from hypothesis import strategies as st

from ampwatch.records import Event
from ampwatch.run_length import LONGEST_WAIT_S, MOST_TOLD, Coder, coded

NAN = float("nan")


def skip(attempt, scale=0.0, **given):
    data = {"scale": scale, "loss": NAN}
    return Event("skip", float(attempt), attempt, **({"step": 3, "stream": 0, "data": data} | given))


def test_what_is_the_same_at_consecutive_attempts_is_told_once():
    (event,) = coded([skip(5), skip(6), skip(7)])
    assert (event.attempt, event.repeat, event.time) == (5, 3, 5.0)


def test_two_kinds_of_events_that_take_turns_are_two_runs():
    events = [Event(kind, 0.0, i, 3, 0) for i in range(4) for kind in ("skip", "backoff")]
    assert [(e.type, e.attempt, e.repeat) for e in coded(events)] == [("skip", 0, 4), ("backoff", 0, 4)]


def test_what_differs_or_is_not_consecutive_stands_alone():
    events = [skip(5), skip(7), skip(8, scale=1.0), skip(9, stream=1), skip(10, step=4)]
    assert coded(events) == events
    twice = [Event("heartbeat", 1.0), Event("heartbeat", 1.0)]
    assert coded(twice) == twice


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 1.0, NAN])), max_size=30))
def test_nothing_is_lost(given):
    events = [skip(attempt, scale) for attempt, scale in given]
    said = [(e.attempt + i, str(e.data)) for e in coded(events) for i in range(e.repeat)]
    assert sorted(said) == sorted((e.attempt, str(e.data)) for e in events)


def coder_at(times):
    return Coder(clock=lambda: times[0])


def said(events):
    return [(e.type, e.attempt, e.repeat) for e in events]


def test_what_only_goes_on_waits_until_something_is_new_and_comes_first():
    coder = coder_at([0.0])
    assert said(coder.code([skip(0), skip(1)])) == [("skip", 0, 2)]
    assert coder.code([skip(2)]) == coder.code([skip(3), skip(4)]) == coder.code([]) == []
    assert said(coder.code([Event("growth", 1.0, 5)])) == [("skip", 2, 3), ("growth", 5, 1)]
    assert said(coder.code([skip(6)])) == [("skip", 6, 1)]  # after a gap it is new


def test_it_waits_no_longer_than_a_bound_and_nothing_waits_at_the_end():
    now = [0.0]
    coder = coder_at(now)
    coder.code([skip(0)])
    assert (coder.code([skip(1)]), coder.is_due) == ([], False)
    now[0] = LONGEST_WAIT_S
    assert coder.is_due
    assert said(coder.code([skip(2)])) == [("skip", 1, 2)]
    assert coder.code([skip(3)]) == []
    assert said(coder.code([], final=True)) == [("skip", 3, 1)]


def test_what_was_told_is_remembered_within_a_bound():
    coder = coder_at([0.0])
    coder.code([skip(0, scale=i) for i in range(10 * MOST_TOLD)])
    assert len(coder._told) == MOST_TOLD
    assert said(coder.code([skip(1, scale=0)])) == [("skip", 1, 1)]  # forgotten: told anew


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), max_size=4), max_size=12))
def test_over_any_flushes_nothing_is_lost(flushes):
    coder, attempt, given, told = coder_at([0.0]), 0, [], []
    for scales in flushes:
        events = [skip(attempt + i, scale) for i, scale in enumerate(scales)]
        attempt += len(scales)
        given += events
        told += coder.code(events)
    told += coder.code([], final=True)
    every = [(e.attempt + i, e.data["scale"]) for e in told for i in range(e.repeat)]
    assert sorted(every) == sorted((e.attempt, e.data["scale"]) for e in given)
