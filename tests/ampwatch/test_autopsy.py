"""Whose statistics are recorded: at which attempts, of which tensors, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ampwatch.autopsy import AFTER, Autopsies
from ampwatch.outcome import Attempt, Outcome, Unscaled
from ampwatch.stats.layout import SCALARS

TENSORS = np.arange(40)


def columns(n_inf=(), n_nan=(), max_abs=()):
    made = np.zeros((len(SCALARS), len(TENSORS)))
    made[SCALARS.index("numel")] = 10
    for name, given in (("n_inf", n_inf), ("n_nan", n_nan), ("max_abs", max_abs)):
        for tensor, value in dict(given).items():
            made[SCALARS.index(name), tensor] = value
    return made


class Run:
    """A run of attempts of one stream."""

    def __init__(self, tensor_every=25):
        self.autopsies = Autopsies(tensor_every)
        self.number = -1

    def attempt(self, *, loss=1.0, norm=1.0, **broken):
        """Answers what is wanted: by attempt, None for all tensors or the ids."""
        self.number += 1
        unscaled = [Unscaled(0, TENSORS, fused=False)]
        attempt = Attempt(self.number, 0, 0, 1.0, [], 1, True, [0], [0], unscaled, False)
        outcome = Outcome(1.0, 1.0, 0, loss, [], False, {}, {}, TENSORS, columns(**broken))
        wanted = self.autopsies.add(attempt, outcome, {"loss": loss, "norm": norm})
        return {w.attempt.attempt: w.only if w.only is None else w.only.tolist() for w in wanted}

    def healthy(self, attempts):
        return [number for _ in range(attempts) for number in self.attempt()]


@pytest.fixture
def run():
    return Run()


def test_the_first_64_and_then_one_in_25(run):
    assert run.healthy(130) == [*range(64), 75, 100, 125]


def test_a_skip_brings_all_that_the_flight_recorder_has(run):
    run.healthy(210)
    assert run.attempt(n_inf={3: 1}) == {n: None for n in range(147, 211) if n % 25}


def test_the_attempts_after_an_autopsy_are_recorded(run):
    run.healthy(201)
    run.attempt(n_inf={3: 1})
    assert run.healthy(AFTER + 3) == [202, 203, 204, 205]


@pytest.mark.parametrize("trouble", [{"loss": math.nan}, {"loss": 5.0}, {"norm": 4.1}, {"n_nan": {0: 1}}])
def test_what_calls_for_an_autopsy(run, trouble):
    run.healthy(101)
    assert len(run.attempt(**trouble)) > 30


@pytest.mark.parametrize("ordinary", [{"loss": 3.9}, {"norm": 4.0}, {"norm": math.nan}, {"loss": -1.0}])
def test_what_does_not(run, ordinary):
    run.healthy(101)
    assert run.attempt(**ordinary) == {}


def exhausted():
    """A run that has had its eight."""
    run = Run()
    run.healthy(101)
    for _ in range(8):
        run.attempt(n_nan={0: 1})
        run.healthy(AFTER)
    run.healthy(20)
    return run


def test_after_eight_only_the_origin_and_the_worst_are_recorded_next_to_it():
    run = exhausted()
    last = run.number
    wanted = run.attempt(n_inf={30: 1}, n_nan={7: 3}, max_abs={i: 40 - i for i in range(40)})
    expected = [7, 30, *(i for i in range(16) if i != 7)][:16]
    assert wanted[last + 1] == sorted(expected)
    assert set(wanted) <= set(range(last - 3, last + 2))


def test_the_first_in_backward_order_is_among_them():
    run = exhausted()
    run.autopsies.order([39, 20, 10])
    wanted = run.attempt(n_nan=dict.fromkeys(range(38), 5) | {39: 1})
    assert 39 in wanted[run.number]


def test_500_attempts_later_one_is_in_full_again():
    run = exhausted()
    last = 101 + 7 * (AFTER + 1)
    run.healthy(last + 499 - run.number)
    assert list(run.attempt(n_nan={0: 1}).values())[-1] is None
    run.healthy(AFTER)
    assert run.attempt(n_nan={0: 1})[run.number] is not None


class Copy(Run):
    """A rank other than the first, of whose tensors the first 38 are averaged by DDP."""

    def __init__(self):
        super().__init__()
        self.autopsies.leave_to_the_first_rank(range(38))


def test_what_the_first_rank_sends_is_left_to_it():
    run = Copy()
    assert [run.attempt() for _ in range(76)][62:] == [
        {62: [38, 39]},
        {63: [38, 39]},
        *[{}] * 11,
        {75: [38, 39]},
    ]


def test_a_loss_of_its_own_that_breaks_brings_all_that_is_left():
    run = Copy()
    run.healthy(70)
    wanted = run.attempt(loss=math.nan)
    assert wanted == {70: None} | {n: list(range(38)) for n in range(7, 64)} | dict.fromkeys(range(64, 70))
    assert run.attempt() == {71: None}


@pytest.mark.parametrize("trouble", [{"n_inf": {3: 1}}, {"norm": 5.0}])
def test_other_trouble_brings_the_worst_next_to_it(trouble):
    run = Copy()
    run.healthy(70)
    wanted = run.attempt(**trouble)
    assert (list(wanted), {len(only) for only in wanted.values()}) == ([66, 67, 68, 69, 70], {16})
    assert 3 in wanted[70]
    assert [list(run.attempt()) for _ in range(2)] == [[71], []]


def test_no_tensor_of_an_attempt_is_recorded_twice():
    run = exhausted()
    told = {}
    for i in range(700):
        for number, only in run.attempt(**({"n_nan": {i % 40: 1}} if i % 3 == 0 else {})).items():
            told.setdefault(number, []).extend(TENSORS.tolist() if only is None else only)
    assert all(len(tensors) == len(set(tensors)) for tensors in told.values())
