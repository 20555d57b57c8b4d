import pytest

from ..recorded import WORKING
from . import twin


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """With the implementation that a user gets; where it fails, so does the test."""
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    twin.statistics[:] = WORKING[-1:]


@pytest.fixture(params=WORKING)
def each_pass(request, strict):
    """With each implementation that works here: for what is about gradients."""
    twin.statistics[:] = [request.param]
