"""Events alike at consecutive attempts, as one that says how often."""

from hypothesis import given
from hypothesis import strategies as st

from ampwatch.records import Event
from ampwatch.run_length import coded

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
