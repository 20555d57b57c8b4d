import math

import pytest
from build import Run


def pinned(n: int, value: float = 1.0, losses: float = 0.1, scale: float = 2.0**16, before: int = 20) -> Run:
    """`n` attempts whose scaled norm is a value, after some whose norm is free."""
    run = Run(scale=scale).clean(
        loss=[2.0 + i for i in range(before)], norm=[(1.0 + 0.1 * i) / 2**10 for i in range(before)]
    )
    return run.clean(loss=[1.0 + losses * i for i in range(n)], norm=[value / scale] * n)


@pytest.mark.parametrize(("n", "kinds"), [(4, []), (5, ["clip_scaled"]), (30, ["clip_scaled"])])
def test_five_attempts_are_wanted(n: int, kinds: list[str]):
    assert [f.kind for f in pinned(n).findings()] == kinds


def test_since_when_and_at_what_true_norm():
    (finding,) = pinned(10).findings()
    assert (finding.severity, finding.first_attempt) == ("error", 20)
    assert finding.evidence[1].text == "At loss scale 2^16 that is a true L2 norm of 1.53e-05."


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"losses": 0.0}, []),  # nothing moves: the same batch again and again
        ({"value": 1.2345}, []),  # a constant gradient, as of a linear loss
        ({"value": 0.25}, ["clip_scaled"]),
        ({"scale": 1.0}, []),  # unscaled: a clip in the right place
    ],
)
def test_what_a_pinned_norm_proves(changes: dict, kinds: list[str]):
    assert [f.kind for f in pinned(10, **changes).findings()] == kinds


def test_any_value_that_is_pinned_through_a_change_of_the_scale_proves_it():
    run = Run(interval=5)
    for _ in range(8):
        run.clean(1, norm=1.2345 / run.scale)
    assert [f.kind for f in run.findings()] == ["clip_scaled"]


def test_a_norm_that_drifts_slowly_is_not_pinned():
    norms = [1.0 / 2**16 * (1 + 9e-6) ** i for i in range(40)]
    assert Run().clean(loss=[1.0 - 0.01 * i for i in range(40)], norm=norms).kinds() == []


def with_column(run: Run, name: str, at: dict[int, float], default: float = 0) -> Run:
    for i, row in enumerate(run.rows):
        row[name] = at.get(i, default)
    return run


def test_one_attempt_that_begins_with_gradients_is_let_pass_and_two_are_not():
    assert with_column(Run().clean(20), "residue", {5: 1, 7: 1}).kinds() == []
    (finding,) = with_column(Run().clean(20), "residue", {5: 1, 6: 1}).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("grads_not_cleared", "error", 5)


def test_what_stays_after_a_skip_is_the_cause_of_the_skips_behind_it():
    run = with_column(Run().clean(50).skip(20), "residue", dict.fromkeys(range(51, 70), 1))
    assert run.kinds() == [("grads_not_cleared", "error", "open")]


def with_nan_losses(times: int, **looked: list[int]) -> Run:
    """Losses that are NaN while every gradient is finite, at attempt 20, 22 …; and what was seen of gradients there."""
    run = Run().clean(20)
    for _ in range(times):
        if looked:
            run.event("accumulated", optimizers=[0], **looked)
        run._row(math.nan, 0.0, run.scale, found_inf=0, n_inf=0)
        run.clean(1)
    return run


@pytest.mark.parametrize(
    ("times", "looked", "expected"),
    [
        (1, {}, ("bad_batch", "warning", 20)),  # it may be a mean over nothing
        (2, {}, ("bad_batch", "warning", 20)),
        (1, {"nonfinite": [0]}, ("cleaned_gradients", "error", 20)),
        (1, {"nonfinite": []}, ("bad_batch", "warning", 20)),
        (2, {"nonfinite": []}, ("bad_batch", "warning", 20)),
    ],
)
def test_a_loss_that_is_nan_with_finite_gradients(times, looked, expected):
    (finding,) = with_nan_losses(times, **looked).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == expected


def test_what_cannot_be_told_is_said():
    unknown, whole = (with_nan_losses(1, **looked).findings()[0] for looked in ({}, {"nonfinite": []}))
    assert "The data cannot tell" in unknown.evidence[0].text
    assert "nothing has cleaned it" in whole.evidence[0].text


@pytest.mark.parametrize(
    ("largest", "kinds"),
    [(65504.0, []), (3.4028234663852886e38, ["cleaned_gradients"])],
)
def test_the_largest_number_of_a_dtype(largest: float, kinds: list[str]):
    run = with_column(Run().clean(20), "max_abs", {5: largest, 9: largest}, 7.0)
    assert [f.kind for f in run.findings()] == kinds
    assert with_column(Run().clean(20), "max_abs", {5: largest}, 7.0).kinds() == []


def test_a_logged_norm_that_is_infinite_by_itself():
    run = with_column(Run().clean(20), "log.grad_norm", {5: math.inf}, 1.0)
    assert run.kinds() == [("norm_overflow", "error", "open")]
    run = with_column(Run().clean(300).skip(1).clean(5), "log.grad_norm", {300: math.inf, 301: math.inf}, 1.0)
    assert [f.kind for f in run.findings()] == ["growth_probe"]


def test_a_pinned_norm_is_told_when_the_scale_has_come_to_0():
    run = pinned(10).skip(20, loss=math.nan)
    run.rows[-1]["scale_after"] = 0.0
    assert "clip_scaled" in [f.kind for f in run.findings()]
