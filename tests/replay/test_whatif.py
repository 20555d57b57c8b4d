import numpy as np
import pytest

from ampwatch.errors import InvalidPolicy
from ampwatch.replay import Recording, recommend, what_if
from ampwatch.replay.policies import POLICIES, Torch
from ampwatch.replay.recorded import attempts_of
from ampwatch.replay.simulate import simulate
from ampwatch.replay.underflow import NOTHING, losses_of, spread
from ampwatch.replay.whatif import code_of, defaults_of


def recorded(policy, ceiling, loss=1.0, losses=NOTHING, headroom=None):
    """What a policy would have recorded under these ceilings."""
    path, n = simulate(policy, ceiling), len(ceiling)
    scale, lost = path.scales(n), np.isin(np.arange(n), path.lost)
    after = np.append(scale[1:], path.final)
    table = {"attempt": np.arange(n), "scale": scale, "scale_after": after, "found_inf": lost}
    table["loss"] = np.full(n, loss)
    if headroom is not None:
        table["headroom_log2"] = np.log2(ceiling / scale)
    own = {"init_scale": scale[0], "growth_interval": getattr(policy, "growth_interval", 2000)}
    return Recording(attempts_of([table]), losses, own, 0.1)


def sampled(scale, exponents, at=(0,)):
    """One float16-born tensor with 100 elements in each of these binades, true magnitudes, at these attempts."""
    n, hist = len(at), np.zeros((len(at), 64), dtype=np.int64)
    for exponent in exponents:
        hist[:, exponent + int(np.log2(scale)) + 48] += 100
    table = {"attempt": np.array(at), "tensor": np.zeros(n, np.int64), "scale": np.full(n, scale)}
    return losses_of([table | {"n_zero": np.zeros(n), "hist": hist}], [0])


def test_the_recorded_setting_gives_the_record():
    recording = recorded(Torch(init_scale=2.0**30, growth_interval=50), np.full(400, 2.0**14))
    replayed = what_if(recording, "torch", {"init_scale": 2.0**30, "growth_interval": 50})
    assert {effect.skipped for effect in replayed.effects.values()} == {replayed.recorded.skipped} == {23}
    assert replayed.code == "torch.amp.GradScaler(init_scale=2.0**30, growth_interval=50)"


def test_the_scale_at_the_end_is_the_one_that_the_last_attempt_left():
    recording = recorded(Torch(), np.zeros(5), loss=np.nan)
    replayed = what_if(recording, "torch")
    ends = {effect.final_scale for effect in (replayed.recorded, *replayed.effects.values())}
    assert ends == {2.0**11}


def test_of_a_trace_without_the_scale_after_the_last_scale_stands_for_it():
    table = {"attempt": np.arange(2), "scale": np.array([8.0, 4.0])}
    assert attempts_of([table]).scale_after.tolist() == [8.0, 4.0]


def test_a_lower_start_saves_the_burst():
    recording = recorded(Torch(init_scale=2.0**30), np.full(400, 2.0**14))
    replayed = what_if(recording, "torch", {"init_scale": 2.0**14})
    assert (replayed.recorded.skipped, replayed.effects["likely"].skipped) == (16, 0)
    assert replayed.effects["worst"].skipped == 16


def test_a_smaller_scale_loses_what_the_histogram_says():
    losses = sampled(2.0**10, [-20, -30])
    assert losses.at(np.array([2.0**10])).tolist() == [0.0]
    assert losses.at(np.array([2.0**4])).tolist() == [0.5]
    assert losses.at(np.array([2.0**-7])).tolist() == [1.0]


def test_samples_are_spread_over_the_run_however_close_its_start_was_recorded():
    assert spread(np.array([0, 1, 2, 3, 51, 100]), 3).tolist() == [0, 51, 100]
    at = sampled(1.0, [-20], at=[*range(64), *range(75, 1000, 25)]).attempt
    assert np.histogram(at, bins=3, range=(0, 999))[0].tolist() == [8, 8, 8]


def test_a_gradient_that_vanished_is_lost_and_comes_back_at_a_larger_scale():
    """One of two tensors is all zero at the recorded scale."""
    hist = np.zeros((2, 64), dtype=np.int64)
    hist[0, 40] = 100
    table = {"attempt": np.zeros(2, np.int64), "tensor": np.arange(2), "scale": np.full(2, 4.0)}
    losses = losses_of([table | {"n_zero": np.array([0, 300]), "hist": hist}], [0, 1])
    assert losses.at(np.array([4.0])).tolist() == [0.75]
    assert losses.at(np.array([8.0])).tolist() == [0.0]


def test_a_scaler_that_raises_says_where():
    recording = recorded(Torch(), np.zeros(60), loss=np.nan)
    effect = what_if(recording, "deepspeed").effects["likely"]
    assert effect.stopped == "DeepSpeed raises: the loss scale is at its minimum already"
    assert effect.stopped_at == 17


@pytest.mark.parametrize(
    ("policy", "parameters", "field"),
    [
        ("adam", {}, "policy"),
        ("torch", {"window": 3}, "parameters.window"),
        ("torch", {"growth_interval": 0}, "parameters.growth_interval"),
        ("torch", {"growth_interval": 1.5}, "parameters.growth_interval"),
        ("torch", {"init_scale": float("nan")}, "parameters.init_scale"),
        ("torch", {"init_scale": -1.0}, "parameters.init_scale"),
        ("torch", {"backoff_factor": True}, "parameters.backoff_factor"),
        ("torch", {"growth_factor": 0.5}, "parameters.growth_factor"),
        ("torch", {"backoff_factor": 1.0}, "parameters.backoff_factor"),
        ("paddle", {"incr_ratio": 1.0}, "parameters.incr_ratio"),
        ("paddle", {"decr_ratio": 2.0}, "parameters.decr_ratio"),
        ("deepspeed", {"scale_factor": 1.0}, "parameters.scale_factor"),
        ("jmp", {"factor": 0.5}, "parameters.factor"),
    ],
)
def test_what_cannot_be_is_named(policy, parameters, field):
    recording = recorded(Torch(), np.full(5, 2.0**20))
    with pytest.raises(InvalidPolicy) as error:
        what_if(recording, policy, parameters)
    assert error.value.field == field


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_replays_with_its_defaults(policy):
    recording = recorded(Torch(), np.full(50, 2.0**20))
    data = what_if(recording, policy).as_dict(points=10)
    assert data["parameters"] == defaults_of(policy)
    assert len(data["replayed"]["likely"]["path"]["attempt"]) == 10


def test_a_path_in_few_points_keeps_its_spike():
    ceiling = np.full(1000, 2.0**20)
    ceiling[500] = 1.0
    path = what_if(recorded(Torch(), ceiling), "torch").as_dict(points=10)["recorded"]["path"]
    assert path["attempt"] == list(range(0, 1000, 100))
    assert (path["low"][5], path["high"][5]) == (2.0**15, 2.0**16)


def test_code_names_what_differs():
    assert code_of("torch", {"init_scale": 2.0**16, "growth_interval": 500}) == (
        "torch.amp.GradScaler(growth_interval=500)"
    )


def test_a_long_burst_is_worth_a_lower_start():
    first = recommend(recorded(Torch(init_scale=2.0**32), np.full(3000, 2.0**14), headroom=True))[0]
    assert (first.kind, first.parameters["init_scale"]) == ("calibration", 2.0**14)
    assert (first.recorded.skipped, first.replayed.skipped) == (19, 1)


def test_a_healthy_run_is_left_as_it_is():
    assert [one.kind for one in recommend(recorded(Torch(), np.full(5000, 2.0**20)))] == ["keep"]


def test_frequent_probing_is_worth_a_longer_interval():
    found = recommend(recorded(Torch(growth_interval=10), np.full(5000, 2.0**16 + 1)))
    assert [one.kind for one in found] == ["probing"]
    assert found[0].parameters["growth_interval"] >= 2000


def test_a_broken_loss_is_not_the_scales_fault():
    found = recommend(recorded(Torch(), np.zeros(40), loss=np.inf))
    assert [one.kind for one in found] == ["not_the_scale"]
    assert found[0].code == ""


def test_underflow_asks_for_a_larger_scale():
    """The scale was 1, far below the ceiling, and growth was off: half of the elements lay under its floor."""
    losses = sampled(1.0, [-20, -24], at=range(100, 4000, 100))
    lost = np.where(np.arange(losses.share.shape[1]) <= 48, 0.5, 0.0)
    losses = losses._replace(share=np.broadcast_to(lost, losses.share.shape))
    recording = recorded(POLICIES["fixed"](1.0), np.full(4000, 2.0**12), losses=losses, headroom=True)
    found = recommend(recording._replace(scaler={"growth_interval": 10_000_000}))
    assert [one.kind for one in found] == ["underflow"]
    assert (found[0].recorded.underflow_share, found[0].replayed.underflow_share) == (0.5, 0.0)
