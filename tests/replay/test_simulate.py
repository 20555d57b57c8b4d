import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwatch.replay.policies import POLICIES, Fixed, Stopped, Torch
from ampwatch.replay.simulate import simulate


def one_by_one(policy, ceiling):
    scales, lost = [], []
    for place, limit in enumerate(ceiling):
        scales.append(policy.scale)
        if limit < policy.scale:
            lost.append(place)
        try:
            policy.update(bool(limit < policy.scale))
        except Stopped:
            break
    return scales, lost, policy.scale


def test_by_hand():
    path = simulate(Torch(init_scale=8.0, growth_interval=2), np.array([4.0, 4.0, 4.0, 4.0, 9.0, 9.0, 9.0]))
    assert path.at.tolist() == [0, 1, 3, 4, 6]
    assert path.scale.tolist() == [8.0, 4.0, 8.0, 4.0, 8.0]
    assert path.lost.tolist() == [0, 3]
    assert (path.stopped, path.final) == (None, 8.0)
    assert path.scales(7).tolist() == [8.0, 4.0, 4.0, 8.0, 4.0, 4.0, 8.0]


def test_a_scaler_that_raises_ends_the_run():
    path = simulate(POLICIES["deepspeed"](init_scale=2.0, min_scale=1.0, delayed_shift=1), np.zeros(9))
    assert path.lost.tolist() == [0, 1]
    assert path.stopped == "DeepSpeed raises: the loss scale is at its minimum already"


def test_a_fixed_scale_is_searched_at_once():
    ceiling = np.full(100_000, 4.0)
    ceiling[[70_000, 99_999]] = 1.0
    assert simulate(Fixed(2.0), ceiling).lost.tolist() == [70_000, 99_999]


@pytest.mark.parametrize("name", POLICIES)
@given(bounds=st.lists(st.integers(-2, 40), max_size=60), window=st.integers(1, 7))
def test_the_same_as_one_attempt_at_a_time(name, bounds, window):
    kind = POLICIES[name]
    given_ = {
        name: window
        for name in kind.__dataclass_fields__
        if name.endswith(("interval", "window", "period", "steps"))
    }
    scales, lost, final = one_by_one(kind(**given_), 2.0 ** np.array(bounds, dtype=float))
    path = simulate(kind(**given_), 2.0 ** np.array(bounds, dtype=float))
    assert path.scales(len(bounds))[: len(scales)].tolist() == scales
    assert (path.lost.tolist(), path.final) == (lost, final)
