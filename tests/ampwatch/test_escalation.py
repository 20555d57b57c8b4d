"""When observers are called for."""

from __future__ import annotations

from ampwatch.escalation import Escalation


def called_for(attempts):
    """Attempts as (stream, loss is finite); answers where a check and where a search was called for."""
    escalation, checks, searches = Escalation(), [], []
    for i, (stream, finite) in enumerate(attempts):
        escalation.add(stream, loss_is_finite=finite)
        checks += [i] if escalation.take_check() else []
        wanted = escalation.take_search()
        searches += [i] if wanted and wanted.stream == stream else []
    return checks, searches


def test_checks_double_and_searches_come_at_the_second_and_64_later():
    assert called_for([(0, False)] * 70) == ([0, 1, 3, 7, 15, 31, 63], [1, 65])


def test_skips_with_a_finite_loss_call_for_nothing():
    assert called_for([(0, True)] * 20) == ([], [])


def nan_skips(attempts):
    """Where a search is called for; attempts with a finite loss, as whether NaN gradients were skipped."""
    escalation, searches = Escalation(), []
    for i, nan_skip in enumerate(attempts):
        escalation.add(0, loss_is_finite=True, nan_skip=nan_skip)
        searches += [i] if escalation.take_search() else []
    return searches


def test_nan_that_a_finite_loss_leaves_out_is_searched_at_the_fourth_skip_and_64_later():
    assert nan_skips([True] * 70) == [3, 67]


def test_skips_that_three_halvings_cure_call_for_nothing():
    assert nan_skips([*[True] * 3, False] * 9) == []


def test_a_new_burst_long_after_starts_again():
    burst, between = [(0, False)] * 3, [(0, True)] * 32
    assert called_for([*burst, *between, *burst]) == ([0, 1, 35, 36], [1, 36])


def test_streams_are_counted_apart():
    assert called_for([(0, False), (1, True)] * 3) == ([0, 2], [2])


def test_a_norm_that_falls_to_an_eighth_is_told_once():
    escalation, fell = Escalation(), []
    for attempt, norm in enumerate([1.0, 0.2, float("nan"), 0.02, 0.01, 0.0, 0.01]):
        escalation.norm(0, attempt, norm)
        fell.append(escalation.take_fall())
    assert fell == [None, None, None, 3, None, None, None]


def test_what_is_not_taken_is_kept():
    escalation = Escalation()
    for _ in range(3):
        escalation.add(0, loss_is_finite=False)
    assert (escalation.take_search(), escalation.take_search()) == ((0, 1), None)


def waits(*finite_between: int, found: bool = False) -> list[tuple[int, int]]:
    """Of single non-finite losses with so many finite ones between them, at which attempt a search is called for and how long."""
    escalation, called, attempt = Escalation(), [], 0
    for finite in (*finite_between, 0):
        for loss_is_finite in (False, *[True] * finite):
            escalation.add(0, loss_is_finite=loss_is_finite)
            wanted = escalation.take_search()
            called += [(attempt, wanted.attempts)] if wanted else []
            attempt += 1
        if found and called:
            escalation.searched(0, {"outputs_finite": False})
    return called


def test_a_loss_that_comes_and_goes_is_waited_for_as_long_as_it_was_away():
    assert waits(9, 9) == [(10, 14)]  # the third falls into the search that the second called for
    assert waits(1, 12, 12) == [(2, 6), (15, 17)]
    assert waits(31) == [(32, 36)]
    assert waits(32) == []


def test_it_is_waited_for_four_times_at_most_and_not_again_once_it_was_met():
    assert waits(*[20, 30] * 9) == [(21, 25), (52, 35), (104, 35), (156, 35)]
    assert waits(*[20, 30] * 9, found=True) == [(21, 25)]
