"""The estimator against the truth: the same batch in float32, and what of it is zero in float16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loops import Transformer, half

from ampwatch.diagnosis.underflow import lost_share, share_at


def gradients(model: Transformer, scale: float, *, float16: bool) -> list[np.ndarray]:
    """Scaled gradients of the weight matrices that autocast computes in float16."""
    model.zero_grad()
    if float16:
        with half():
            loss = model.loss(7)
    else:
        loss = model.loss(7)
    (loss * scale).backward()
    names = [name for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    return [model.get_parameter(name).grad.double().numpy().ravel() for name in names]


def shares(model: Transformer, scale_log2: int) -> tuple[float, float, float]:
    """True, estimated and largest possible share of the elements that float16 lost at a scale."""
    true = gradients(model, 1.0, float16=False)
    left = gradients(model, 2.0**scale_log2, float16=True)
    hist = np.stack([np.bincount(np.frexp(g[g != 0])[1] + 47, minlength=64) for g in left])
    estimate = lost_share(hist, [np.count_nonzero(g == 0) for g in left])
    lost = sum(np.count_nonzero((t != 0) & (g == 0)) for t, g in zip(true, left, strict=True))
    seen = hist.sum()
    return (
        lost / (lost + seen),
        float(estimate.lost.sum() / (estimate.lost.sum() + seen)),
        float(estimate.bound.sum() / (estimate.bound.sum() + seen)),
    )


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Trained for a little while in float32, so that gradients are no longer those of the initial weights."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(30):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("scale_log2", range(-14, 17, 2))
def test_the_truth_lies_between_estimate_and_bound(model: Transformer, scale_log2: int):
    true, estimate, bound = shares(model, scale_log2)
    print(f"scale 2^{scale_log2}: true {true:.2%}, estimate {estimate:.2%}, bound {bound:.2%}")
    assert estimate <= 1.25 * true + 0.002
    assert true <= bound


@pytest.mark.parametrize("scale_log2", range(-8, 17, 2))
def test_where_less_than_a_twentieth_is_lost_the_estimate_is_near(model: Transformer, scale_log2: int):
    true, estimate, _ = shares(model, scale_log2)
    assert true < 0.05
    assert estimate == pytest.approx(true, rel=0.5, abs=0.002)


def test_what_a_larger_scale_would_lose_is_foretold(model: Transformer):
    left = gradients(model, 2.0**-12, float16=True)
    hist = np.stack([np.bincount(np.frexp(g[g != 0])[1] + 47, minlength=64) for g in left])
    estimate = lost_share(hist, [np.count_nonzero(g == 0) for g in left])
    elements = hist.sum(axis=1) + estimate.lost
    foretold = float((share_at(estimate.shape, 6) * elements).sum() / elements.sum())
    true, _, _ = shares(model, -6)
    assert foretold == pytest.approx(true, abs=0.005)
