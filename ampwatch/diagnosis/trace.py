"""Traces without instrumentation: a CSV file or JSON lines, one row for each attempt, as batches for the diagnosis.

    attempt,scale,found_inf,loss
    0,65536,1,2.31
    1,32768,0,2.30

Only `attempt` and `scale` are required. What else a trace may hold is in docs/cli.md; what it does not hold cannot be
judged, and `Trace.not_judged` says so. The policy of the scaler tells what its scale means: with hysteresis a skip may
leave it as it was, and at a floor every skip does (docs/replay.md).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ampwatch.errors import InvalidBatch, RunNotFound
from ampwatch.records import (
    ATTEMPT_COLUMNS,
    FLAG,
    INT,
    LOGGED_PREFIX,
    MISSING,
    Batch,
    Event,
    pack_events,
    pack_table,
)

from . import texts


class Policy(NamedTuple):
    """What of a scaler's policy the diagnosis needs; defaults of docs/replay.md.

    Arguments:
        interval: clean attempts from one growth to the next.
        hysteresis: overflows from one backoff to the next.
        floor: the scale at which backoffs end; 0 for none.
        new_scale: gradients are divided by the scale that the attempt leaves.
    """

    interval: int = 2000
    hysteresis: int = 1
    floor: float = 0.0
    new_scale: bool = False


POLICIES: Final[dict[str, Policy]] = {
    "torch": Policy(),
    "apex": Policy(),
    "deepspeed": Policy(1000, 2, 1.0, new_scale=True),
    "deepspeed-fp16": Policy(1000, 1, 1.0, new_scale=True),
    "megatron": Policy(1000, 2, 1.0),
    "colossalai": Policy(1000, 2, 1.0, new_scale=True),
    "fairseq": Policy(2000, 1, 1e-4),
    "paddle": Policy(),
    "keras": Policy(),
    "keras2": Policy(floor=1.0),
    "jmp": Policy(floor=1.0),
    "flax": Policy(),
    "mindspore": Policy(floor=1.0),
}
TRACE: Final = "trace"  # as a run
ALIASES: Final = {
    "grad_norm": "norm",
    "gradient_norm": "norm",
    "loss_scale": "scale",
    "learning_rate": "lr",
    "iteration": "attempt",
    "overflow": "found_inf",
}
_NEEDED_FOR: Final = ("found_inf", "loss", "norm", "lr", "batch_id")
_TEXT: Final = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "-infinity"})
_FLAGS: Final = {"true": 1.0, "false": 0.0}


class Trace(NamedTuple):
    """A trace as the batches that a run would have left, and what it does not hold."""

    batches: list[Batch]
    not_judged: list[str]


def read_trace(path: str | Path, policy: str = "torch") -> Trace:
    """Read a trace; `.csv` is CSV with a header, anything else JSON lines.

    Errors: RunNotFound where there is no such file; InvalidBatch for a row that cannot be read or an unknown policy.
    """
    path = Path(path)
    if policy not in POLICIES:
        raise InvalidBatch("policy", f"got {policy!r}, it must be one of {', '.join(POLICIES)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise RunNotFound(f"there is no trace at {path}") from None
    except UnicodeDecodeError as error:
        raise InvalidBatch("trace", f"{path} is not text: {error}") from error
    try:
        rows = list(_csv(text) if path.suffix.lower() == ".csv" else _json_lines(text))
    except InvalidBatch as error:
        raise InvalidBatch(f"{path}, {error.field}", error.reason) from None
    if not rows:
        raise InvalidBatch("trace", f"{path} holds no row")
    return Trace(list(_batches(path, rows, policy)), _not_judged(rows, policy))


def _csv(text: str) -> Iterator[dict[str, float]]:
    for number, row in enumerate(csv.DictReader(text.splitlines(), skipinitialspace=True), start=2):
        yield _checked(number, row)


def _json_lines(text: str) -> Iterator[dict[str, float]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidBatch(f"line {number}", f"it is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise InvalidBatch(f"line {number}", "it must be an object, one for each attempt")
            yield _checked(number, row)


def _checked(number: int, row: Mapping[str, Any]) -> dict[str, float]:
    named = {ALIASES.get(name, name): value for name, value in row.items() if isinstance(name, str)}
    numbers = {name: x for name, value in named.items() if (x := _number(value)) is not None}
    for name in ("attempt", "scale"):
        if name not in numbers:
            raise InvalidBatch(f"line {number}.{name}", f"it is required, got {named.get(name)!r}")
    if not numbers["attempt"].is_integer() or numbers["attempt"] < 0:
        raise InvalidBatch(f"line {number}.attempt", f"got {numbers['attempt']:g}, attempts count from 0")
    return numbers


def _number(value: Any) -> float | None:
    """A number; None for what is empty or is none."""
    if isinstance(value, bool | int | float):
        return float(value)
    if not isinstance(value, str) or not value.strip():
        return None
    word = value.strip().lower()
    if word in _FLAGS:
        return _FLAGS[word]
    try:
        return float(word) if word in _TEXT or word[-1].isdigit() or word[-1] == "." else None
    except ValueError:
        return None


def _batches(path: Path, rows: Sequence[dict[str, float]], policy: str) -> Iterator[Batch]:
    of_rank: dict[int, list[dict[str, float]]] = {}
    for row in rows:
        of_rank.setdefault(int(row.get("rank", 0)), []).append(row)
    for rank, its in sorted(of_rank.items()):
        its.sort(key=lambda row: row["attempt"])
        producer = hashlib.blake2b(f"{path.name}:{rank}".encode(), digest_size=16).hexdigest()
        key = {"producer": producer, "run": TRACE, "rank": rank}
        yield pack_events(_events(its, policy), seq=0, **key)  # type: ignore[arg-type]
        yield pack_table("attempts", _table(its), seq=1, **key)  # type: ignore[arg-type]


def _events(rows: Sequence[dict[str, float]], policy: str) -> Iterator[Event]:
    known = POLICIES[policy]
    scaler = {"scaler": 0, "policy": policy, "enabled": True, "init_scale": rows[0]["scale"]}
    scaler |= {
        "growth_interval": _interval(rows, known.interval),
        "hysteresis": known.hysteresis,
        "new_scale": known.new_scale,
    }
    yield Event("scaler", 0.0, data=scaler)
    for stream in sorted({int(row.get("stream", 0)) for row in rows}):
        yield Event(
            "stream", 0.0, stream=stream, data={"stream": stream, "scaler": 0, "optimizers": [stream]}
        )


def _interval(rows: Sequence[dict[str, float]], known: int) -> int:
    """Clean attempts from one growth to the next: the fewest that the trace shows, else those of the policy."""
    clean, fewest = 0, 0
    for row, after in pairwise(rows):
        grew = after["scale"] > row["scale"]
        clean = 0 if row.get("found_inf") or after["scale"] < row["scale"] else clean + 1
        if grew:
            fewest, clean = min(fewest or clean, clean), 0
    return fewest or known


def _table(rows: Sequence[dict[str, float]]) -> dict[str, np.ndarray[Any, Any]]:
    given = {name for row in rows for name in row} - {"rank"}
    table = {name: _column(rows, name) for name in given if name in ATTEMPT_COLUMNS}
    for name in given - set(ATTEMPT_COLUMNS):
        if name.replace("_", "").isalnum():
            table[LOGGED_PREFIX + name] = np.array([row.get(name, MISSING) for row in rows])
    if "step" not in table:
        table["step"] = table["attempt"]
    if "scale_after" not in table:
        table["scale_after"] = np.append(table["scale"][1:], table["scale"][-1])
    if "found_inf" not in table:
        table["found_inf"] = (table["scale_after"] < table["scale"]).astype(np.uint8)
    if "norm" in table:
        table.setdefault("numel", np.isfinite(table["norm"]).astype(np.int64))  # gradients were there
    return table


def _column(rows: Sequence[dict[str, float]], name: str) -> np.ndarray[Any, Any]:
    dtype = ATTEMPT_COLUMNS[name]
    if dtype in (INT, FLAG):
        return np.array([int(x) if math.isfinite(x := row.get(name, 0)) else 0 for row in rows], dtype)
    return np.array([row.get(name, MISSING) for row in rows], dtype)


def _not_judged(rows: Iterable[Mapping[str, float]], policy: str) -> list[str]:
    given = {name for row in rows for name in row}
    missing = [texts.NOT_JUDGED[name] for name in _NEEDED_FOR if name not in given]
    if "found_inf" not in given and POLICIES[policy].hysteresis > 1:
        missing.append(texts.NOT_JUDGED["hysteresis"])
    return [*missing, texts.NOT_JUDGED["instrumentation"]]
