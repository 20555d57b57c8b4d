"""Rows as they come out of batches: one table, each row once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np

from ampwatch import records
from ampwatch.records import Array, Batch, Table

from .points import concat, select
from .windows import WINDOW


def with_seq(batch: Batch) -> Table:
    """The table of a batch, with the batch's number beside each row, and stream 0 where it names none."""
    table = dict(batch.table())
    n = len(table["attempt"])
    table.setdefault("stream", np.zeros(n, np.int64))
    return table | {"seq": np.full(n, batch.seq, np.int64)}


def unique(table: Table) -> Table:
    """Each (tensor, attempt) once, in this order: of rows that say different things the latest batch's stays.

    The rule looks at nothing but the rows, so the order in which batches arrived changes nothing.
    """
    n = len(table["attempt"])
    tensor = table.get("tensor", np.zeros(n, np.int64))
    order = np.lexsort((table["seq"], table["attempt"], tensor))
    attempt, tensor = table["attempt"][order], tensor[order]
    last = np.ones(n, np.bool_)
    last[:-1] = (np.diff(attempt) != 0) | (np.diff(tensor) != 0)
    return select(table, order[last])


def split(table: Table, key: Callable[[Table], Array]) -> Iterator[tuple[int, Table]]:
    """The table by values of `key`, ascending."""
    keys = key(table)
    for value in np.unique(keys):
        yield int(value), select(table, keys == value)


def by_stream(table: Table) -> Iterator[tuple[int, Table]]:
    """The rows of each stream."""
    return split(table, lambda t: t["stream"])


def by_window(table: Table) -> Iterator[tuple[int, Table]]:
    """The rows of each window of level 0, by its first attempt."""
    return split(table, lambda t: t["attempt"] // WINDOW * WINDOW)


def union(tables: Iterable[Table]) -> Table | None:
    """All rows of several tables, each once; None where there is no table."""
    given = list(tables)
    return unique(concat(given)) if given else None


def as_batch(
    kind: Literal["attempts", "tensors"], table: Table, *, producer: str, seq: int, run: str, rank: int
) -> Batch:
    """A table of the store as a batch again, for whoever reads batches: the columns as they were sent."""
    known = records.COLUMNS[kind]
    sent = {n: c for n, c in table.items() if n in known or n.startswith(records.LOGGED_PREFIX)}
    return records.pack_table(kind, sent, producer=producer, seq=seq, run=run, rank=rank)
