"""A recorded run as a replay takes it: the attempts of one scaler in one process after another, and what underflowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from ampwatch.diagnosis.described import Described
from ampwatch.errors import RunNotFound
from ampwatch.records import Batch, Table

from .recorded import Attempts, attempts_of
from .underflow import Losses, losses_of

_LONGEST_S: Final = 600.0  # a pause longer than that is no attempt's time


class Recording(NamedTuple):
    """What is replayed.

    Arguments:
        attempts: of one scaler, numbered through the processes of a rank.
        losses: what its scales lost, at sampled attempts.
        scaler: the data of its `scaler` event.
        attempt_s: median time of an attempt, s; None where it is not known.
    """

    attempts: Attempts
    losses: Losses
    scaler: Mapping[str, Any]
    attempt_s: float | None


@dataclass
class _Process:
    """The batches of one producer."""

    rank: int
    described: Described = field(default_factory=Described)
    world_size: int = 1
    started: float = float("inf")
    attempts: list[Table] = field(default_factory=list)
    tensors: list[Table] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        if batch.kind != "events":
            (self.attempts if batch.kind == "attempts" else self.tensors).append(batch.table())
            return
        events = batch.events()
        self.described.add(events)
        for event in events:
            self.started = min(self.started, event.time)
            if event.type == "run":
                self.world_size = int(event.data.get("world_size") or self.world_size)


def recording_of(batches: Iterable[Batch], *, rank: int | None = None, scaler: int = 0) -> Recording:
    """The recording of a run's batches, in any order.

    Arguments:
        rank: whose attempts; None for the lowest rank that recorded.
        scaler: its index, where a run has several.

    RunNotFound for a rank or a scaler that the run does not have.
    """
    processes: dict[str, _Process] = {}
    for batch in batches:
        processes.setdefault(batch.producer, _Process(batch.rank)).add(batch)
    ranks = {process.rank for process in processes.values() if process.attempts}
    wanted = min(ranks, default=0) if rank is None else rank
    its = sorted((p for p in processes.values() if p.rank == wanted), key=lambda p: p.started)
    if rank is not None and not its:
        raise RunNotFound(f"the run has no rank {rank}; those it has: {', '.join(map(str, sorted(ranks)))}")
    return joined([part_of(p.described, p.attempts, p.tensors, p.world_size, scaler) for p in its])


def part_of(
    described: Described,
    attempts: Iterable[Table],
    tensors: Iterable[Table],
    world_size: int,
    scaler: int = 0,
) -> Recording:
    """The recording of one process.

    Arguments:
        described: what its events say.
        attempts, tensors: its tables; of each other scaler's streams nothing is taken.
    """
    if scaler and described.scalers and scaler not in described.scalers:
        known = ", ".join(map(str, sorted(described.scalers)))
        raise RunNotFound(f"the run has no scaler {scaler}; those it has: {known}")
    streams = {index for index in described.streams if described.streams[index].get("scaler", 0) == scaler}
    mine = [_of_streams(table, streams) for table in attempts]
    samples = [_of_streams(table, streams) for table in tensors]
    return Recording(
        attempts_of(mine, averaged=world_size > 1),
        losses_of(samples, described.born("float16")),
        described.scalers.get(scaler, {}),
        _attempt_s(mine),
    )


def joined(parts: list[Recording]) -> Recording:
    """Processes one after the other, as one run; the scaler is that of the first."""
    if not parts:
        return part_of(Described(), [], [], 1)
    begins = np.cumsum([0, *(_end(part) for part in parts)])
    shifted = [_shifted(part, int(first)) for part, first in zip(parts, begins, strict=False)]
    attempts = Attempts(*map(np.concatenate, zip(*(part.attempts for part in shifted), strict=True)))
    losses = Losses(*map(np.concatenate, zip(*(part.losses for part in shifted), strict=True)))
    times = [part.attempt_s for part in parts if part.attempt_s is not None]
    return Recording(attempts, losses, parts[0].scaler, float(np.median(times)) if times else None)


def _of_streams(table: Table, streams: set[int]) -> Table:
    if not streams or "stream" not in table:
        return table
    inside = np.isin(table["stream"], list(streams))
    return table if inside.all() else {name: column[inside] for name, column in table.items()}


def _end(part: Recording) -> int:
    return int(part.attempts.attempt[-1]) + 1 if part.attempts.n else 0


def _shifted(part: Recording, first: int) -> Recording:
    attempts = part.attempts._replace(attempt=part.attempts.attempt + first)
    return part._replace(attempts=attempts, losses=part.losses._replace(attempt=part.losses.attempt + first))


def _attempt_s(tables: Iterable[Table]) -> float | None:
    gaps = np.concatenate(
        [np.diff(np.sort(table["time"])) for table in tables if "time" in table] or [np.zeros(0)]
    )
    gaps = gaps[(gaps > 0) & (gaps < _LONGEST_S)]
    return float(np.median(gaps)) if len(gaps) else None
