"""Traces without instrumentation: CSV or JSON, one row for each attempt, as batches for the diagnosis.

    attempt,scale,found_inf,loss
    0,65536,1,2.31
    1,32768,0,2.30

Only `attempt` and `scale` are required. What else a trace may hold is in docs/cli.md; what it does not hold cannot be
judged, and `Trace.not_judged` says so. The policy of the scaler tells what its scale means: with hysteresis a skip may
leave it as it was, and at a floor every skip does (docs/replay.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ampwatch.errors import InvalidBatch
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
from .trace_rows import Row, read_rows


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
LEAP: Final = 4.0  # times that no growth makes a scale larger
_NEEDED_FOR: Final = ("found_inf", "loss", "norm", "lr", "batch_id")


class Trace(NamedTuple):
    """A trace as the batches that a run would have left, what it does not hold, and what its names were read as."""

    batches: list[Batch]
    not_judged: list[str]
    read: str = ""


def read_trace(path: str | Path, policy: str = "torch") -> Trace:
    """Read a trace: CSV with a header, JSON lines or a JSON array (`trace_rows`).

    Errors: RunNotFound where there is no such file; InvalidBatch for a row that cannot be read or an unknown policy.
    """
    path = Path(path)
    if policy not in POLICIES:
        raise InvalidBatch("policy", f"got {policy!r}, it must be one of {', '.join(POLICIES)}")
    read = read_rows(path)
    return Trace(
        list(_batches(path, read.rows, policy)), [*read.notes, *_not_judged(read.rows, policy)], read.names
    )


def _batches(path: Path, rows: Sequence[Row], policy: str) -> Iterator[Batch]:
    for rank, its in sorted(_of_ranks(rows).items()):
        producer = hashlib.blake2b(f"{path.name}:{rank}".encode(), digest_size=16).hexdigest()
        key = {"producer": producer, "run": TRACE, "rank": rank}
        parts = _parts(its)
        events = [event for i, part in enumerate(parts) for event in _events(part, policy, i)]
        yield pack_events(events, seq=0, **key)  # type: ignore[arg-type]
        yield pack_table("attempts", _table(parts), seq=1, **key)  # type: ignore[arg-type]


def _of_ranks(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """The rows of each rank, by attempt."""
    of_rank: dict[int, list[Row]] = {}
    for row in rows:
        of_rank.setdefault(int(row.get("rank", 0)), []).append(row)
    return {rank: sorted(its, key=lambda row: row["attempt"]) for rank, its in of_rank.items()}


def _parts(rows: list[Row]) -> list[list[Row]]:
    """The rows of each scaler: one that is back at its first scale from far below was made anew, and has a stream of its own."""
    if any("stream" in row for row in rows):
        return [rows]
    parts: list[list[Row]] = [[]]
    for row in rows:
        before = parts[-1][-1] if parts[-1] else row
        if row["scale"] == rows[0]["scale"] > LEAP * before.get("scale_after", before["scale"]):
            parts.append([])
        parts[-1].append(row | {"stream": len(parts) - 1.0})
    return parts


def _events(rows: Sequence[Row], policy: str, index: int) -> Iterator[Event]:
    """A scaler and its streams; all but the first scaler take the place of the one before."""
    known, at = POLICIES[policy], int(rows[0]["attempt"])
    scaler = {"scaler": index, "policy": policy, "enabled": True, "init_scale": rows[0]["scale"]}
    scaler |= {
        "growth_interval": _interval(rows, known.interval),
        "hysteresis": known.hysteresis,
        "new_scale": known.new_scale,
    }
    yield Event("scaler", 0.0, attempt=at, data=scaler | ({"replaces": index - 1} if index else {}))
    for stream in sorted({int(row.get("stream", 0)) for row in rows}):
        told = {"stream": stream, "scaler": index, "optimizers": [0 if index else stream]}
        yield Event("stream", 0.0, stream=stream, data=told)


def _interval(rows: Sequence[Row], known: int) -> int:
    """Clean attempts from one growth to the next: the fewest that the trace shows, else those of the policy."""
    clean, fewest = 0, 0
    for row, after in pairwise(rows):
        grew = after["scale"] > row["scale"]
        clean = 0 if row.get("found_inf") or after["scale"] < row["scale"] else clean + 1
        if grew:
            fewest, clean = min(fewest or clean, clean), 0
    return fewest or known


def _table(parts: Sequence[Sequence[Row]]) -> dict[str, np.ndarray[Any, Any]]:
    rows = [row for part in parts for row in part]
    given = {name for row in rows for name in row} - {"rank"}
    table = {name: _column(rows, name) for name in given if name in ATTEMPT_COLUMNS}
    for name in given - set(ATTEMPT_COLUMNS):
        if name.replace("_", "").isalnum():
            table[LOGGED_PREFIX + name] = np.array([row.get(name, MISSING) for row in rows])
    if "step" not in table:
        table["step"] = table["attempt"]
    if "scale_after" not in table:
        ends = np.cumsum([len(part) for part in parts]) - 1  # a scaler's last scale is not known
        table["scale_after"] = np.append(table["scale"][1:], 0.0)
        table["scale_after"][ends] = table["scale"][ends]
    untold = np.array([math.isnan(row.get("found_inf", math.nan)) for row in rows])
    fell = table["scale_after"] < table["scale"]
    table["found_inf"] = np.where(untold, fell, table.get("found_inf", 0)).astype(FLAG)
    if "norm" in table:
        table.setdefault("numel", np.isfinite(table["norm"]).astype(np.int64))  # gradients were there
    return table


def _column(rows: Sequence[Row], name: str) -> np.ndarray[Any, Any]:
    dtype = ATTEMPT_COLUMNS[name]
    if dtype in (INT, FLAG):
        numbers = [row.get(name, 0.0) for row in rows]
        if dtype == FLAG:
            return np.array([x != 0 and not math.isnan(x) for x in numbers], dtype)
        return np.array([int(x) if abs(x) < 2**63 else 0 for x in numbers], dtype)
    return np.array([row.get(name, MISSING) for row in rows], dtype)


def _not_judged(rows: Sequence[Row], policy: str) -> list[str]:
    given = {name for row in rows for name in row}
    missing = [texts.NOT_JUDGED[name] for name in _NEEDED_FOR if name not in given]
    if "found_inf" not in given and POLICIES[policy].hysteresis > 1:
        missing.append(texts.NOT_JUDGED["hysteresis"])
    return [*_gaps(rows), *missing, texts.NOT_JUDGED["instrumentation"]]


def _gaps(rows: Sequence[Row]) -> list[str]:
    """Of the rank that has most: attempts between its first and its last that are not in the trace."""
    its = max(_of_ranks(rows).values(), key=len)
    span = int(its[-1]["attempt"] - its[0]["attempt"]) + 1
    return [texts.NOT_JUDGED["gaps"].format(rows=len(its), span=span)] if len(its) < span else []
