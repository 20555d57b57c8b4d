"""The watched scaler on a real GPU beside torch's: the same bits, and no wait for the device that torch's has not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def watched(statistics, folder, model):
    settings = Settings(dir=folder, statistics=statistics, quiet=True, project="gpu")
    return ampwatch.GradScaler("cuda", model=model, settings=settings)


def trained(make_scaler, *, fused):
    """Weights and scale after twelve steps, one of them skipped; and how often the host waited in the last ten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=fused), make_scaler(model)
    inputs = [torch.full((8, 64), torch.inf if i == 6 else 1.0 + i, device="cuda") for i in range(12)]
    waits = 0
    for i, x in enumerate(inputs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if i >= 2 else "default")  # the first compile and allocate
            try:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits += sum("synchroniz" in str(each.message) for each in caught)
    return [p.tolist() for p in model.parameters()], scaler.state_dict(), waits


@pytest.mark.parametrize("statistics", ["triton", "reference"])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_scale_and_waits_are_torchs(statistics, fused, tmp_path):
    expected = trained(lambda _: torch.amp.GradScaler("cuda"), fused=fused)
    ours = trained(lambda model: watched(statistics, tmp_path, model), fused=fused)
    ampwatch.finish()
    assert ours == expected
    assert expected[2] == 0 or not fused
