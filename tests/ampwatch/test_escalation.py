"""When observers are called for."""

from __future__ import annotations

from ampwatch.escalation import Escalation


def called_for(attempts):
    """Attempts as (stream, loss is finite); answers where a check and where a search was called for."""
    escalation, checks, searches = Escalation(), [], []
    for i, (stream, finite) in enumerate(attempts):
        escalation.add(stream, loss_is_finite=finite)
        checks += [i] if escalation.take_check() else []
        searches += [i] if escalation.take_search() == stream else []
    return checks, searches


def test_checks_double_and_searches_come_at_the_second_and_64_later():
    assert called_for([(0, False)] * 70) == ([0, 1, 3, 7, 15, 31, 63], [1, 65])


def test_skips_with_a_finite_loss_call_for_nothing():
    assert called_for([(0, True)] * 20) == ([], [])


def test_a_new_burst_starts_again():
    burst = [(0, False)] * 3
    assert called_for([*burst, (0, True), *burst]) == ([0, 1, 4, 5], [1, 5])


def test_streams_are_counted_apart():
    assert called_for([(0, False), (1, True)] * 3) == ([0, 2], [2])


def test_what_is_not_taken_is_kept():
    escalation = Escalation()
    for _ in range(3):
        escalation.add(0, loss_is_finite=False)
    assert (escalation.take_search(), escalation.take_search()) == (0, -1)


def test_a_search_that_met_a_finite_loss_is_made_up_for_at_the_next_that_is_not():
    burst = [(0, False)] * 2
    assert called_for([*burst, (0, True), (0, True), (0, False), (0, False)])[1] == [1, 4]


def test_it_is_made_up_for_eight_times_at_most():
    comes_and_goes = [(0, True), (0, False)] * 12
    assert called_for([(0, False), (0, False), *comes_and_goes])[1] == [1, *range(3, 19, 2)]
