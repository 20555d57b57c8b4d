from __future__ import annotations

import pytest
import torch

from ..recorded import WORKING, MemoryRecorder


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    torch.manual_seed(0)


@pytest.fixture(params=WORKING)
def recorder(request):
    return MemoryRecorder(statistics=request.param)
