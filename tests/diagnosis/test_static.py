import pytest
from build import Run

CHECK = {
    "id": 0,
    "class": "AdamW",
    "fused": False,
    "eps": 1e-8,
    "closure": False,
    "trainable": 4,
    "frozen": 0,
}
CHECK |= {"foreign": 0, "with_grad": 4, "low": {}, "state_dtypes": [], "devices": ["cpu"], "shared": []}


def checked(run: Run | None = None, **changes: object) -> Run:
    return (run or Run()).event("check", **(CHECK | changes)).clean(5)


@pytest.mark.parametrize(
    ("dtype", "changes", "severity"),
    [
        ("float16", {}, "error"),
        ("float16", {"fused": True}, "warning"),
        ("bfloat16", {}, "warning"),
        ("bfloat16", {"devices": ["cuda"]}, "error"),
        ("complex64", {"fused": True}, "error"),
    ],
)
def test_low_precision_is_an_error_where_torch_raises(dtype: str, changes: dict, severity: str):
    (finding,) = checked(low={dtype: ["head.weight"]}, **changes).findings()
    assert (finding.kind, finding.severity, finding.tensor) == (
        "low_precision_params",
        severity,
        "head.weight",
    )


def test_shared_parameters_name_both_optimizers():
    run = Run().event("check", **CHECK)
    shared = [{"optimizer": 0, "count": 2, "tensors": ["body.weight", "body.bias"]}]
    (finding,) = checked(run, id=1, **{"class": "SGD"}, shared=shared).findings()
    assert finding.headline.startswith("SGD and AdamW both hold body.weight")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trainable": 0, "frozen": 4}, "all of them are frozen"),
        ({"foreign": 4}, "it holds other tensors than the model"),
        ({"foreign": 3, "loss_has_graph": False}, "its graph is cut"),
        ({"loss_has_graph": True}, "the loss does not depend on them"),
        ({"foreign": None}, "the loss does not depend on them"),
    ],
)
def test_why_there_is_no_gradient(changes: dict, why: str):
    (finding,) = checked(with_grad=0, stepped_empty=True, **changes).findings()
    assert (finding.kind, finding.severity, why in finding.headline) == ("no_gradients", "error", True)


def test_an_empty_shard_and_a_foreign_temperature_are_silent():
    run = Run()
    run.events[0].data["class"] = "ShardedGradScaler"
    assert checked(run, stepped_empty=True, with_grad=0).kinds() == []
    assert checked(foreign=4).kinds() == []


def off(**scaler: object) -> Run:
    run = Run()
    run.events[0].data.update(enabled=False, **scaler)
    return run.event("autocast", dtype="float16", device="cpu")


def test_a_scaler_that_is_off_is_missing_or_was_turned_off():
    assert off().kinds() == [("missing_scaler", "error", "open")]
    assert off(asked=False, device="cuda").kinds() == [("missing_scaler", "error", "open")]
    assert off(asked=True, device="cuda").kinds() == [("backend_limit", "warning", "open")]


@pytest.mark.parametrize(
    ("eps", "kinds"), [(1e-8, ["epsilon_underflow"]), (5.9e-8, ["epsilon_underflow"]), (6e-8, [])]
)
def test_an_eps_below_float16(eps: float, kinds: list[str]):
    assert [f.kind for f in checked(eps=eps, state_dtypes=["float16", "float32"]).findings()] == kinds


def test_an_eps_is_fatal_once_weights_are_not_finite():
    run = checked(state_dtypes=["float16"]).broken(3)
    assert [f.severity for f in checked(state_dtypes=["float16"]).findings()] == ["warning"]
    run.event("finite_check", attempt=5, parameters={"checked": 4, "nonfinite": ["w"], "count": 1})
    assert run.kinds() == [("epsilon_underflow", "fatal", "open")]


def test_float32_state_and_fused_optimizers_have_no_such_eps():
    assert checked(state_dtypes=["float32"]).kinds() == []
    assert checked(state_dtypes=["float16"], fused=True).kinds() == []


def poisoned_after(run: Run, fused: bool) -> list[str]:
    run.event("check", attempt=0, **(CHECK | {"fused": fused})).broken(4)
    bad = {"checked": 4, "nonfinite": ["head.weight"], "count": 4}
    return [f.kind for f in run.event("finite_check", attempt=11, parameters=bad).findings()]


def test_weights_that_broke_in_a_skipped_attempt_are_the_fused_optimizers():
    assert poisoned_after(Run().clean(10).skip(1), fused=True) == ["fused_optimizer"]
    assert poisoned_after(Run().clean(10).skip(1), fused=False) == ["weights_poisoned"]
    assert poisoned_after(Run().clean(11), fused=True) == ["weights_poisoned"]


LOOK = {
    "optimizer": 0,
    "tensors": [0],
    "lr": 1e-5,
    "since": 0,
    "compared": 64,
    "with_gradient": 64,
    "moved": 0,
}


def looked(run: Run, *steps: int, **changes: object) -> list[tuple[str, str]]:
    """Findings where weights were compared after so many steps."""
    for each in steps:
        run.event("weights", attempt=each, **(LOOK | {"steps": each} | changes))
    return [(f.kind, f.severity) for f in run.findings() if f.severity != "info"]


def test_weights_that_no_step_moves_are_told_at_the_third_look():
    assert looked(Run().clean(8), 1, 3) == []
    assert looked(Run().clean(8), 1, 3, 7) == [("low_precision_params", "error")]


@pytest.mark.parametrize("changes", [{"moved": 1}, {"with_gradient": 0}, {"tensors": []}])
def test_weights_that_moved_or_were_not_to_move_are_silent(changes: dict):
    assert looked(Run().clean(16), 1, 3, 7, 15, **changes) == []


def test_weights_behind_steps_that_were_skipped_are_not_told_yet():
    assert looked(Run().skip(3).clean(5), 1, 3, 7) == []
    assert looked(Run().skip(3).clean(13), 1, 3, 7, 15) == [("low_precision_params", "error")]
