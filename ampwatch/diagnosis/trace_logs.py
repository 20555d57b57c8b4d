"""Training logs whose lines tell one attempt each, in the forms in which frameworks print them.

    iteration   5/ 1000 | learning rate: 1.500E-04 | lm loss: 7.0E+00 | loss scale: 65536.0 | …    Megatron
    2024-01-01 | INFO | train_inner | {"loss": "7.2", "num_updates": "5", "loss_scale": "128"}     fairseq

Other lines of the log are left out and counted. Megatron prints the scale that an iteration leaves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

_ITERATION: Final = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*$")
_PART: Final = re.compile(r"^\s*([A-Za-z][^:|]*?)\s*:\s*(\S+)\s*$")
_SKIP: Final = re.compile(r"overflow.*skipping step|skipping step.*loss scale", re.IGNORECASE)


class Line(NamedTuple):
    """A line of a log, from 1, with what it says by name."""

    number: int
    row: dict[str, Any]


def lines_of(text: str) -> list[Line]:
    """The lines that tell an attempt; none for a file that is no such log."""
    found: list[Line] = []
    scale = None  # that the line before left
    for number, line in enumerate(text.splitlines(), start=1):
        row = _of_megatron(line) or _of_fairseq(line)
        if "loss scale" in row:
            row["scale_after"] = row.pop("loss scale")
            row["scale"] = scale or row["scale_after"]
            scale = row["scale_after"]
        if "scale" in row or "loss_scale" in row:
            found.append(Line(number, row))
    return found


def count_of_skips(text: str) -> int:
    """How many lines say that a step was skipped and nothing else, as Apex and DeepSpeed print them."""
    return sum(1 for _ in _SKIP.finditer(text))


def _of_megatron(line: str) -> dict[str, Any]:
    first, *parts = line.split("|")
    iteration = _ITERATION.search(first)
    if iteration is None:
        return {}
    return {"iteration": iteration[1], **dict(_pairs(parts))}


def _pairs(parts: list[str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        if (told := _PART.match(part)) is not None:
            yield told[1], told[2]


def _of_fairseq(line: str) -> dict[str, Any]:
    before, mark, rest = line.partition("| {")
    if not (before and mark and rest.rstrip().endswith("}")):
        return {}
    try:
        row = json.loads("{" + rest)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
