import numpy as np
import pytest

from ampwatch.records import MISSING
from ampwatch.replay.ceiling import ceilings
from ampwatch.replay.policies import Torch
from ampwatch.replay.recorded import attempts_of
from ampwatch.replay.simulate import simulate


def attempts(**columns):
    table = {name: np.array(column, dtype=float) for name, column in columns.items()}
    return attempts_of([{"attempt": np.arange(len(table["scale"])), **table}])


def test_a_clean_attempt_is_bounded_by_its_headroom():
    found = ceilings(attempts(scale=[8.0, 8.0], headroom_log2=[3.0, MISSING]))
    assert found.worst.tolist() == [8.0, 8.0]
    assert found.best.tolist() == [64.0, np.inf]


def test_an_overflow_says_no_more_than_below():
    found = ceilings(attempts(scale=[8.0], found_inf=[1], loss=[2.0]))
    assert (found.worst[0], found.best[0]) == (0.0, 8.0 * (1 - 2.0**-24))


@pytest.mark.parametrize(("scale", "loss"), [(8.0, np.nan), (8.0, np.inf), (0.0, 1.0)])
def test_no_scale_helps_a_loss_that_is_not_finite_nor_what_overflows_at_0(scale, loss):
    found = ceilings(attempts(scale=[scale, 8.0], found_inf=[1, 0], loss=[loss, 1.0]))
    assert (found.worst[0], found.likely[0], found.best[0]) == (-1.0, -1.0, -1.0)


def test_a_step_taken_at_a_scale_of_0_bounds_nothing():
    found = ceilings(attempts(scale=[0.0, 0.0], found_inf=[0, 1], loss=[1.0, 1.0]))
    assert (found.worst[0], found.best[0]) == (0.0, np.inf)


def test_a_loss_that_is_missing_is_not_one_that_broke():
    assert attempts(scale=[8.0], found_inf=[1], loss=[MISSING]).loss_finite.tolist() == [True]


def test_the_estimate_takes_the_gap_that_the_run_shows():
    """Overflows at 2^10 while the neighbours' gradients would allow 2^12: activations overflow two binades before."""
    scale, skipped = [512.0, 1024.0, 512.0], [0, 1, 0]
    found = ceilings(
        attempts(scale=scale, found_inf=skipped, loss=[1.0] * 3, headroom_log2=[3.0, MISSING, 3.0])
    )
    assert np.log2(found.likely[[0, 2]]).tolist() == [10.0, 10.0]
    assert found.likely[1] == 1024.0 * (1 - 2.0**-24)


@pytest.mark.parametrize(("name", "value"), [("micro_batches", 2.0), ("losses", 2.0)])
def test_accumulated_gradients_bound_nothing(name, value):
    found = ceilings(attempts(scale=[8.0], headroom_log2=[3.0], **{name: [value]}))
    assert found.best.tolist() == [np.inf]


def test_gradients_averaged_over_ranks_bound_nothing():
    table = {"attempt": np.arange(1), "scale": np.array([8.0]), "headroom_log2": np.array([3.0])}
    assert ceilings(attempts_of([table], averaged=True)).best.tolist() == [np.inf]


def test_the_recorded_policy_does_again_what_it_did():
    rng = np.random.default_rng(3)
    true = 2.0 ** (12 + np.cumsum(rng.normal(0, 0.05, 4000)))
    path = simulate(Torch(growth_interval=20), true)
    overflow = np.isin(np.arange(4000), path.lost)
    recorded = attempts(scale=path.scales(4000), found_inf=overflow, loss=np.ones(4000))
    for case in ceilings(recorded):
        again = simulate(Torch(growth_interval=20), case)
        assert (again.lost.tolist(), again.final) == (path.lost.tolist(), path.final)


@pytest.mark.parametrize("loss", [1.0, np.nan])
def test_the_recorded_policy_does_again_what_it_did_down_to_a_scale_of_0(loss):
    """Torch's scale is 0 from the 166th skip in a row on: 2^-149 is the smallest float32."""
    path = simulate(Torch(), np.full(200, -1.0))
    lost, losses = np.ones(200), np.full(200, loss)
    recorded = attempts(scale=path.scales(200), found_inf=lost, loss=losses)
    assert (path.final, len(path.lost)) == (0.0, 200)
    for case in ceilings(recorded):
        assert simulate(Torch(), case).lost.tolist() == path.lost.tolist()
