"""What the device or the backend does, and fused optimizers."""

import math

import pytest
from build import TENSOR, Run

CHECK = {
    "module": "stem",
    "module_type": "Conv2d",
    "output_n_nan": 512.0,
    "output_numel": 512.0,
    "float32_max_abs": 3.5,
    "input_max_abs": 2.0,
    "weight_max_abs": 0.4,
}


def loud(run: Run) -> list[tuple[str, str]]:
    return [(f.kind, f.severity) for f in run.findings() if f.severity != "info"]


def broken_device(**changes: float) -> list[tuple[str, str]]:
    return loud(Run().broken(3).event("float32_check", **(CHECK | changes)).broken(2))


def test_a_layer_that_is_nan_throughout_and_small_in_float32():
    assert broken_device() == [("device_fault", "fatal")]


@pytest.mark.parametrize(
    "changes",
    [
        {"output_n_nan": 511.0},
        {"float32_max_abs": 40000.0},
        {"float32_max_abs": math.inf},
        {"weight_max_abs": 1e5},
    ],
)
def test_what_float16_cannot_hold_is_no_fault_of_the_device(changes: dict[str, float]):
    assert broken_device(**changes) == [("nonfinite_forward", "fatal")]


def test_a_device_that_has_worked_before_is_not_blamed():
    run = Run().clean(5).broken(3).event("float32_check", **CHECK).broken(2)
    assert loud(run) == [("nonfinite_forward", "fatal")]


def saturating(n: int, hooks: int = 0) -> list[tuple[str, str]]:
    run = Run().clean(20).event("check", attempt=0, id=0, hooks=hooks)
    for i, row in enumerate(run.rows):
        row["max_abs"] = 65504.0 if i < n else 7.0
    return loud(run)


def test_a_largest_gradient_of_65504_is_a_backend_that_saturates_or_a_hook():
    assert [saturating(4), saturating(5)] == [[], [("backend_limit", "warning")]]
    assert saturating(5, hooks=3) == [("cleaned_gradients", "error")]


def test_attempts_that_are_hidden():
    assert loud(Run().clean(3).event("captured").clean(3)) == [("backend_limit", "warning")]
    run = Run().clean(10)
    for row in run.rows:
        row |= {"losses": 0, "stepped": 1}
    assert loud(run) == [("backend_limit", "warning")]
    run.rows[0]["losses"] = 1  # scale() can be seen, and the loop leaves it out
    assert loud(run) == []


def test_a_sparse_sum_that_overflows_explains_the_skip():
    run = Run().event("tensors", tensors=[TENSOR | {"id": 0, "name": "words.weight"}])
    (finding,) = run.event("sparse_overflow", tensors=[0]).skip(1).clean(5).findings()
    assert (finding.kind, finding.severity, finding.tensor) == ("sparse_overflow", "warning", "words.weight")


STEP = {
    "optimizer": 0,
    "unscaled": True,
    "lr": 0.1,
    "scale": 2.0**16,
    "gradient": 2.0,
    "gradient_after": 2.0,
    "moved": 0.2,
    "moment": 0.2,
}


@pytest.mark.parametrize(
    ("name", "value", "kinds"),
    [
        ("gradient_after", 2.0**-15, ["fused_optimizer"]),
        ("moment", 0.1 * 2.0**-15, ["fused_optimizer"]),
        ("moved", 0.1 * 2.0**-15, ["fused_optimizer"]),
        ("moved", 1e-3, []),  # Adam's, whatever the gradient
        ("found_inf", 1.0, ["fused_optimizer"]),  # weights moved
        ("scale", 16.0, []),
        ("gradient", math.inf, []),
    ],
)
def test_a_step_whose_traces_are_a_scale_too_small(name: str, value: float, kinds: list[str]):
    run = Run().event("fused_step", **(STEP | {name: value})).clean(5)
    assert [f.kind for f in run.findings()] == kinds


@pytest.mark.parametrize(
    ("found_inf", "state", "told"),
    [(1.0, 1.0, 1.0), (1.0, 0.0, None), (0.0, 1.0, None), (1.0, math.nan, math.nan)],
)
def test_a_state_that_changes_in_a_step_to_be_skipped(found_inf: float, state: float, told: float | None):
    step = STEP | {"unscaled": False, "found_inf": found_inf, "moved": 0.0, "moment": 0.0, "state": state}
    found = Run().event("fused_step", **step).clean(5).findings()
    values = [(f.kind, f.severity, f.first_attempt, str(f.evidence[0].value)) for f in found]
    assert values == ([] if told is None else [("fused_optimizer", "fatal", 0, str(told))])
