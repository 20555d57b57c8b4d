"""Every reported case is a test here, or covered.json says why it cannot be one.

By the case's name: the tests that hold it, relative to this folder, or the reason.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COVERED: dict[str, list[str] | str] = json.loads((HERE / "covered.json").read_text(encoding="utf-8"))
FAMILIES = {
    "ACC": 4, "API": 5, "AUX": 3, "BE": 3, "BF16": 2, "BUF": 1, "BYP": 3, "CAL": 5, "CLIP": 4, "DATA": 3, "DIV": 6,
    "DTYPE": 3, "EPS": 3, "FLOOR": 5, "FUSED": 3, "FWD": 6, "HW": 1, "LOSS": 5, "MASK": 3, "MULTI": 3, "OBS": 6,
    "RANK": 2, "SPARSE": 1, "STATE": 3, "UND": 3,
}  # cases of each, 86 in all  # fmt: skip


@cache
def names_in(file: str) -> set[str]:
    """Functions of a test file, and the texts of its tables."""
    nodes = list(ast.walk(ast.parse((HERE / file).read_text())))
    texts = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return texts | {each.name for each in nodes if isinstance(each, ast.FunctionDef)}


def test_no_case_is_forgotten():
    assert {family: sum(case.startswith(f"{family}-") for case in COVERED) for family in FAMILIES} == FAMILIES
    assert len(COVERED) == sum(FAMILIES.values()) == 86


@pytest.mark.parametrize("case", COVERED)
def test_a_case_is_tested_or_has_its_reason(case: str):
    held = COVERED[case]
    if isinstance(held, str):
        assert held.endswith(".")
        return
    assert held
    for test in held:
        file, _, name = test.partition("::")
        assert {*name.removesuffix("]").split("[")} <= names_in(file), test
