"""The recorder in memory of the other tests; and the warnings of the frameworks, which are theirs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ampwatch"))


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def strict(monkeypatch, tmp_path):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    monkeypatch.setenv("AMPWATCH_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
