import numpy as np
import pytest
from build import TENSOR, Run

from ampwatch.diagnosis.underflow import lost_share, lost_share_at, share_at

LOW = {-24: 300, -23: 400, -22: 500, -21: 400, -20: 200}  # ends at the smallest subnormal
HIGH = {-10: 300, -9: 400, -8: 500, -7: 400, -6: 200}  # the same, 14 binades higher


def histogram(counts: dict[int, int]) -> np.ndarray:
    hist = np.zeros(64)
    for log2, count in counts.items():
        hist[log2 + 48] = count
    return hist


def test_zeros_alone_are_never_underflow():
    estimate = lost_share(histogram(HIGH), 1_000_000)
    assert estimate.share < 1e-3
    assert estimate.bound_share == pytest.approx(1_000_000 / 1_001_800)


def test_without_zeros_nothing_was_lost():
    assert lost_share(histogram(LOW), 0).share == 0


def test_the_estimate_never_exceeds_the_zeros():
    assert lost_share(histogram(LOW), 5).lost <= 5


def test_too_few_elements_are_not_judged():
    estimate = lost_share(histogram({-24: 63}), 1000)
    assert (estimate.lost, estimate.shape) == (0, -1)


def test_shape_is_kept_over_leading_axes():
    hist = np.stack([histogram(LOW), histogram(HIGH)]).reshape(2, 1, 64)
    estimate = lost_share(hist, [[800], [800]])
    assert estimate.share.shape == (2, 1)
    assert estimate.share[0, 0] > 0.05 > estimate.share[1, 0]


@pytest.mark.parametrize("sigma_log2", [-24, -22, -20, -18])
def test_gaussian_gradients_are_estimated_within_a_quarter(sigma_log2: int):
    true = np.random.default_rng(0).normal(size=200_000) * 2.0**sigma_log2
    kept = np.abs(true.astype(np.float16).astype(np.float64))
    hist = np.bincount(np.frexp(kept[kept > 0])[1] - 1 + 48, minlength=64)
    estimate = lost_share(hist, (kept == 0).sum())
    assert estimate.share == pytest.approx((kept == 0).mean(), rel=0.25)


def test_a_smaller_scale_loses_what_it_moves_below_the_limit():
    hist = histogram({-20: 10, -15: 30})
    assert [float(lost_share_at(hist, k)) for k in (0, 5, 6, 9, 11)] == [0, 0, 0.25, 0.25, 1.0]
    assert lost_share_at(hist, 5.5) == 0.125


def test_a_larger_scale_loses_less():
    shape = lost_share(histogram(LOW), 800).shape
    shares = [float(share_at(shape, k)) for k in range(6)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 4 * shares[5]


def underflowing(scale: float = 2.0**-8, origin: str = "float16", samples: int = 3, **tensor: int) -> Run:
    run = Run(scale=scale, interval=10**9).event("tensors", tensors=[TENSOR | {"id": 0}])
    run.event("origin", origins={"0": origin})
    for _ in range(samples):
        run.clean(1).tensor(LOW, zeros=800)
    return run


def test_a_scale_too_small_is_a_warning_with_the_scale_that_would_serve():
    (finding,) = underflowing().findings()
    assert (finding.kind, finding.severity, finding.tensor, finding.module) == (
        "underflow",
        "warning",
        "head.weight",
        "head",
    )
    assert (finding.first_step, finding.last_step) == (0, 2)
    assert "init_scale=2.0**" in finding.advice[0].code
    assert finding.headline.endswith("It does not recover by itself: the scale does not grow.")


def test_one_sample_is_not_enough():
    assert underflowing(samples=1).kinds() == []


@pytest.mark.parametrize("origin", ["unknown", "bfloat16"])
def test_only_float16_born_tensors_are_judged(origin: str):
    assert underflowing(origin=origin).kinds() == []


def test_no_room_above_is_not_underflow():
    run = underflowing(samples=0)
    for _ in range(3):
        run.clean(1).tensor(LOW | {14: 1}, zeros=800, max_abs=2.0**14)
    assert run.kinds() == []


def test_it_starts_at_the_first_sample_of_the_row_that_lost():
    run = underflowing(samples=2)
    run.clean(1).tensor(HIGH, zeros=800)
    for _ in range(2):
        run.clean(1).tensor(LOW, zeros=800)
    (finding,) = run.findings()
    assert finding.first_attempt == 3


def test_all_zero_gradients_with_a_loss_are_said_with_less_confidence():
    run = Run(scale=2.0**-20).event("autocast", dtype="float16", device="cpu").clean(6)
    for row in run.rows:
        row["n_zero"] = row["numel"]
    (finding,) = run.findings()
    assert (finding.kind, finding.confidence) == ("underflow", 0.6)


def test_all_zero_gradients_of_a_loss_of_zero_are_healthy():
    run = Run(scale=2.0**-20).event("autocast", dtype="float16", device="cpu").clean(6, loss=0.0)
    for row in run.rows:
        row["n_zero"] = row["numel"]
    assert run.kinds() == []


@pytest.mark.parametrize("kind", ["LayerNorm", "BatchNorm2d", "RMSNorm", "Embedding"])
def test_gradients_computed_in_float32_are_not_judged(kind: str):
    run = Run(scale=1.0).event("tensors", tensors=[{**TENSOR, "id": 0, "module_type": kind}])
    run.event("origin", origins={"0": "float16"})
    for _ in range(3):
        run.clean(1).tensor(LOW, zeros=800)
    assert run.kinds() == []
