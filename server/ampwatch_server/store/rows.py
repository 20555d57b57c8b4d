"""Rows as they come out of batches: one table, each row once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Literal

import numpy as np

from ampwatch import records
from ampwatch.records import FLAG, INT, Array, Batch, Table, is_missing

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
    if "tensor" not in table and (np.diff(table["attempt"]) > 0).all():
        return table
    order = np.lexsort((table["seq"], table["attempt"], tensor))
    attempt, tensor = table["attempt"][order], tensor[order]
    last = np.ones(n, np.bool_)
    last[:-1] = (np.diff(attempt) != 0) | (np.diff(tensor) != 0)
    return select(table, order[last])


def split(table: Table, key: Callable[[Table], Array]) -> Iterator[tuple[int, Table]]:
    """The table by values of `key`, ascending."""
    keys = key(table)
    if not len(keys):
        return
    steps = np.diff(keys)
    if (steps < 0).any():  # not as they are sent
        order = np.argsort(keys, kind="stable")
        table, keys = select(table, order), keys[order]
        steps = np.diff(keys)
    for first, last in pairwise([0, *(np.flatnonzero(steps) + 1).tolist(), len(keys)]):
        yield int(keys[first]), select(table, slice(first, last))


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


def as_sent(kind: Literal["attempts", "tensors"], table: Table) -> Iterator[Table]:
    """Rows of the store as tables that a client could have sent, for whoever reads batches.

    Where batches had different columns, a column is missing in some rows. Integers cannot be missing in a batch:
    rows that lack one go into a table without it.
    """
    known = records.COLUMNS[kind]
    kept = {n: c for n, c in table.items() if n in known or records.is_added(n)}
    lacking = {
        n: is_missing(c) for n, c in kept.items() if known.get(n) in (INT, FLAG) and c.dtype.kind == "f"
    }
    if "hist" in kept:
        lacking["hist"] = is_missing(table["lost_share"])
    if not lacking:
        yield kept
        return
    patterns, place = np.unique(np.stack(list(lacking.values())), axis=1, return_inverse=True)
    for i, pattern in enumerate(patterns.T):
        without = {name for name, absent in zip(lacking, pattern, strict=True) if absent}
        yield select({n: c for n, c in kept.items() if n not in without}, place == i)
