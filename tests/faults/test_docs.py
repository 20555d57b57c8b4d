"""Every kind has a page, and the example on it is diagnosed as that kind."""

from pathlib import Path

import pytest

import ampwatch
from ampwatch.diagnosis import diagnose
from ampwatch.diagnosis.precedence import PRECEDENCE

PAGES = Path(__file__).parents[2] / "docs" / "faults"


def example(kind: str) -> str:
    text = (PAGES / f"{kind}.md").read_text()
    return text.partition("```python\n")[2].partition("```")[0]


def test_there_is_a_page_for_every_kind_and_no_other():
    assert {page.stem for page in PAGES.glob("*.md")} == set(PRECEDENCE)


@pytest.mark.parametrize("kind", PRECEDENCE)
def test_the_example_shows_the_fault(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMPWATCH_QUIET", "1")
    monkeypatch.setenv("AMPWATCH_DIR", str(tmp_path))
    monkeypatch.delenv("AMPWATCH_SERVER", raising=False)
    exec(compile(example(kind), f"{kind}.md", "exec"), {"__name__": kind})
    ampwatch.finish()
    trace = tmp_path / "trace.csv"
    kinds = [f.kind for f in (diagnose(trace, "deepspeed") if trace.exists() else diagnose(tmp_path))]
    assert kinds[0] == kind
    assert set(kinds[1:]) <= {"calibration", "growth_probe", "spike"}
