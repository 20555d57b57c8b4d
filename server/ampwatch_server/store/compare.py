"""Comparing runs: what they came to, their curves, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection

from ampwatch_server.settings import Settings

from .runs import get_run
from .series import Range, read_series
from .tail import TailReader

MOST_RUNS: Final = 10
_MOST_DIFFERENCES: Final = 500
_COMPARED: Final = ("config", "scalers", "optimizers", "versions", "world_size")


def compare_runs(
    connection: Connection,
    tails: TailReader,
    settings: Settings,
    runs: Sequence[str],
    names: Sequence[str],
    asked: Range,
) -> dict[str, Any]:
    """`Comparison` of some runs, in their order. RunNotFound."""
    found = [get_run(connection, settings, run) for run in runs]
    series = [read_series(connection, tails, run, names, asked) for run in runs]
    return {"runs": found, "series": series, "differences": _differences(found)}


def _differences(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the runs were told or made of and do not share, by its path; null where a run lacks it."""
    flat = [dict(_leaves("", {name: run[name] for name in _COMPARED})) for run in runs]
    paths = dict.fromkeys(path for leaves in flat for path in leaves)
    rows = [{"name": path, "values": [leaves.get(path) for leaves in flat]} for path in paths]
    return [row for row in rows if any(v != row["values"][0] for v in row["values"])][:_MOST_DIFFERENCES]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}.{i}", item)
    else:
        yield path, value
