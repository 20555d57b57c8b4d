"""Checks what `ampwatch demo --exit --json` printed: three runs, three verdicts, step and module named."""

import json
import sys
from pathlib import Path
from typing import Any

EXPECTED = [
    {"word": "healthy", "kind": None, "module": ""},
    {"word": "failing", "kind": "forward_overflow", "module": "blocks.1.attention"},
    {"word": "warning", "kind": "underflow"},
]


def check(printed: dict[str, Any]) -> None:
    runs = printed["runs"]
    assert len(runs) == len(EXPECTED)
    for run, expected in zip(runs, EXPECTED, strict=True):
        verdict = run["verdict"]
        assert {name: verdict[name] for name in expected} == expected, verdict
        print(f"{run['name']}: {verdict['sentence']}")
    assert runs[1]["verdict"]["first_step"] == printed["overflow_at"]
    assert runs[2]["verdict"]["module"]


if __name__ == "__main__":
    check(json.loads(Path(sys.argv[1]).read_text()))
