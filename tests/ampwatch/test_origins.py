"""When gradients are looked at for their origin, and what is kept of it."""

from __future__ import annotations

from ampwatch.origins import Origins, Schedule


def looked_at(attempts, *, first_clean=None, known_from=None):
    """The attempts that are looked at, of so many; the ones from which on there is a clean one and a known origin."""
    schedule = Schedule()
    return [
        i + 1
        for i in range(attempts)
        if schedule.calls_after(
            clean=first_clean is not None and i >= first_clean,
            is_known=lambda i=i: known_from is not None and i >= known_from,
        )
    ]


def test_while_nothing_is_known_looks_double_their_distance():
    assert looked_at(100) == [1, 2, 4, 8, 16, 32, 64]


def test_the_attempt_after_the_first_clean_one_is_looked_at():
    assert looked_at(20, first_clean=9) == [1, 2, 4, 8, 10, 16]


def test_what_is_known_is_looked_at_every_thousand_attempts():
    assert looked_at(2100, first_clean=0, known_from=0) == [1000, 2000]
    assert looked_at(2100, first_clean=5, known_from=4) == [1, 2, 4, 1000, 2000]


def test_a_known_origin_stays():
    origins = Origins()
    origins.add({"0": "float16", "1": "bfloat16", "2": "unknown"})
    origins.add({"0": "unknown", "3": "float16"})
    assert (origins.known, origins.float16) == ({0, 1, 3}, {0, 3})
