"""Every policy against what the real object did: 492 cases recorded on the CPU from the packages themselves.

`traces.json.gz` holds, for each scaler, its version, and cases of: its arguments, the overflows it was given, the
scale before and after each attempt, its counters, and the attempt at which it raised.
"""

import gzip
import json
import math
from pathlib import Path

import pytest

from ampwatch.replay import policies as p

TRACES = json.loads(gzip.decompress((Path(__file__).parent / "traces.json.gz").read_bytes()))
ITERATING = {"cur_iter": "iteration", "last_overflow_iter": "last"}
ZERO = ITERATING | {"cur_hysteresis": "left"}
# The recording, the policy, how its arguments are called here ("": not a part of the policy), and its counters.
FOLLOWED = {
    "torch_gradscaler": (p.Torch, {}, {"_growth_tracker": "clean"}),
    "torch_shardedgradscaler_cpu": (p.ShardedOnCpu, {}, {"_growth_tracker": "clean"}),
    "apex_amp_lossscaler": (p.Apex, {"scale_factor": ""}, {"_unskipped": "clean"}),
    "apex_fp16utils_dynamiclossscaler": (p.ApexFP16Utils, {}, ITERATING),
    "colossalai_dynamicgradscaler": (
        p.ColossalAI,
        {},
        {"_growth_step": "clean", "_hysteresis_step": "overflows"},
    ),
    "deepspeed_0.16.9_consecutive_hysteresis": (p.DeepSpeedZeRO016, {}, ZERO),
    "deepspeed_0.16.9_hysteresis1": (p.DeepSpeedZeRO016, {}, ZERO),
    "deepspeed_0.16.9_hysteresis2": (p.DeepSpeedZeRO016, {}, ZERO),
    "deepspeed_consecutive_hysteresis": (p.DeepSpeedZeRO, {}, ZERO),
    "deepspeed_hysteresis1": (p.DeepSpeedZeRO, {}, ZERO),
    "deepspeed_hysteresis2": (p.DeepSpeedZeRO, {}, ZERO),
    "deepspeed_hysteresis3": (p.DeepSpeedZeRO, {}, ZERO),
    "deepspeed_fp16_fused": (p.DeepSpeedFP16, {"delayed_shift": ""}, ITERATING),
    "deepspeed_fp16_unfused": (p.DeepSpeedFP16, {"delayed_shift": ""}, ITERATING),
    "fairseq": (
        p.Fairseq,
        {},
        {
            "_iter": "iteration",
            "_last_overflow_iter": "last",
            "_last_rescale_iter": "last_rescale",
            "_overflows_since_rescale": "overflows",
        },
    ),
    "flax_dynamicscale": (p.Flax, {"scale": "init_scale"}, {"fin_steps": "clean"}),
    "jmp_dynamiclossscale": (p.Jmp, {}, {"counter": "clean"}),
    "keras2_lossscaleoptimizer": (p.Keras2, {}, {"dynamic_counter": "clean"}),
    "keras2_lossscaleoptimizer_legacy": (p.Keras2, {}, {"dynamic_counter": "clean"}),
    "keras3_lossscaleoptimizer": (p.Keras, {}, {"step_counter": "clean"}),
    "megatron_dynamicgradscaler": (
        p.Megatron,
        {},
        {"_growth_tracker": "clean", "_hysteresis_tracker": "left"},
    ),
    "mindspore_amp_dynamiclossscaler": (
        p.Jmp,
        {"scale_value": "loss_scale", "scale_window": "period", "scale_factor": "factor"},
        {"counter": "clean"},
    ),
    "mindspore_manager": (p.MindSporeManager, {}, ITERATING | {"bad_step": "overflows"}),
    "mindspore_updatecell": (p.MindSporeCell, {}, ITERATING),
    "optax_apply_if_finite": (
        p.ApplyIfFinite,
        {},
        {"notfinite_count": "overflows", "update_applied": "applied"},
    ),
    "paddle_gradscaler": (p.Paddle, {}, {"incr_count": "clean", "decr_count": "overflows"}),
    "paddle_static_update_loss_scaling": (
        p.PaddleStatic,
        {},
        {"num_good_steps": "clean", "num_bad_steps": "overflows"},
    ),
    "tf_v1_dynamiclossscale": (
        p.Keras2,
        {
            "initial_loss_scale": "initial_scale",
            "increment_period": "dynamic_growth_steps",
            "multiplier": "multiplier",
        },
        {"num_good_steps": "clean"},
    ),
}
# An error of types at its first attempt, which is no rule of a loss scale.
NOT_A_POLICY = "float16_loss_scale_default_min"


def _followed(trace):
    name = next(name for name in sorted(FOLLOWED, key=len, reverse=True) if trace.startswith(name))
    return FOLLOWED[name]


def _made(trace, case):
    kind, names, _ = _followed(trace)
    given = {names.get(name, name): value for name, value in case["params"].items() if names.get(name, name)}
    if trace in ("keras3_lossscaleoptimizer_jax", "keras3_lossscaleoptimizer_tensorflow"):
        given["flush_subnormals"] = True
    if "jit" in case["name"]:
        given["through_jit"] = True
    return kind(**given)


def _number(value):
    return math.inf if value == "inf" else value


CASES = [
    pytest.param(trace, case, id=f"{trace}-{case['name']}")
    for trace, recorded in TRACES.items()
    for case in recorded["cases"]
    if case["name"] != NOT_A_POLICY
]


@pytest.mark.parametrize(("trace", "case"), CASES)
def test_agrees_in_every_scale_counter_and_raise(trace, case):
    policy, counters = _made(trace, case), _followed(trace)[2]
    for t, overflow in enumerate(case["overflow"]):
        assert policy.scale == _number(case["scale_used"][t])
        if t == case["raised_at"]:
            with pytest.raises(p.Stopped):
                policy.update(bool(overflow))
        else:
            policy.update(bool(overflow))
        assert policy.scale == _number(case["scale_after"][t])
        for name, mine in counters.items():
            assert getattr(policy, mine) == case["counters"][name][t], (t, name)


@pytest.mark.parametrize(("trace", "case"), CASES)
def test_clean_attempts_at_once_are_the_same_as_one_by_one(trace, case):
    policy = _made(trace, case)
    t, overflows = 0, case["overflow"]
    while t < len(overflows) and t != case["raised_at"]:
        ahead = next((i for i in range(t, len(overflows)) if overflows[i]), len(overflows)) - t
        clean = min(ahead, policy.quiet())
        before = policy.scale
        policy.advance(clean)
        assert policy.scale == before
        t += clean
        if t < len(overflows) and t != case["raised_at"]:
            policy.update(bool(overflows[t]))
            assert policy.scale == _number(case["scale_after"][t])
            t += 1


def test_every_policy_is_followed():
    kinds = {kind for kind, _, _ in FOLLOWED.values()} | {p.Fixed}
    assert kinds == set(p.POLICIES.values())
    assert all(_followed(trace) for trace in TRACES)
