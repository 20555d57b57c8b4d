"""The tail: what was acknowledged but lies in no chunk yet."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.records import FORMAT_VERSION, Array, Batch, Table, pack_table
from ampwatch_server.tables import inbox, producers

from .points import KEYS, concat, select
from .rows import by_stream, unique, with_seq
from .stats import with_lost_share
from .windows import MAX_ATTEMPT, WINDOW

_CACHED_BYTES: Final = 64 << 20

Key = tuple[int, int]  # of a waiting batch: producer_id, seq

BATCH_COLUMNS: Final = (
    inbox.c.producer.label("producer_id"),
    producers.c.producer,
    producers.c.rank,
    *(inbox.c[name] for name in ("run", "seq", "kind", "first", "last", "folded", "digest", "body")),
)

_WAITING: Final = (
    sa.select(inbox.c.seq, inbox.c.digest, inbox.c.folded)
    .where(inbox.c.producer == sa.bindparam("producer_id"), inbox.c.kind == sa.bindparam("kind"))
    .order_by(inbox.c.seq)
)


@dataclass(frozen=True)
class Tail:
    """Rows of one producer and kind that wait in the inbox, by stream; and the windows of level 0 they lie in."""

    streams: dict[int, Table] = field(default_factory=dict)

    def touched(self, stream: int) -> list[int]:
        """First attempts of the windows in which the stream has waiting rows, ascending."""
        rows = self.streams.get(stream)
        return [] if rows is None else np.unique(rows["attempt"] // WINDOW * WINDOW).tolist()


class TailReader:
    """Reads tails. Keeps decoded batches, at most 64 MiB of them: a live page asks for the same ones every second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int, str], Table] = OrderedDict()
        self._bytes = 0

    def read(
        self,
        connection: Connection,
        producer_id: int,
        kind: str,
        names: Collection[str] | None = None,
        *,
        among: Collection[Key] | None = None,
    ) -> Tail:
        """The tail of one producer, its rows each once.

        Arguments:
            names: of the columns only these and the keys.
            among: of the batches only these.
        """
        tables = []
        mine = {"producer_id": producer_id, "kind": kind}
        for seq, digest, folded in connection.execute(_WAITING, mine).all():
            if among is None or (producer_id, seq) in among:
                table = self._decoded(connection, (producer_id, seq, digest))
                tables.append(_chosen(table, names, folded))
        if not tables:
            return Tail()
        return Tail({stream: unique(rows) for stream, rows in by_stream(concat(tables))})

    def decoded(self, row: Row[tuple[object, ...]], shape: Array | None = None) -> Table:
        """The table of a waiting batch, a row of `BATCH_COLUMNS`, as it will lie in chunks of level 0.

        Arguments:
            shape: `stats.fitted` of the table, where it is known.
        """
        got = row._mapping
        key = (got["producer_id"], got["seq"], got["digest"])
        table = self._known(key)
        return decode(batch_of(row), shape) if table is None else table

    def _decoded(self, connection: Connection, key: tuple[int, int, str]) -> Table:
        table = self._known(key)
        if table is not None:
            return table
        query = _batches().where(inbox.c.producer == key[0], inbox.c.seq == key[1])
        table = decode(batch_of(connection.execute(query).one()))
        self._keep(key, table)
        return table

    def _known(self, key: tuple[int, int, str]) -> Table | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[int, int, str], table: Table) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = table
            self._bytes += _size(table)
            while self._bytes > _CACHED_BYTES:
                self._bytes -= _size(self._kept.popitem(last=False)[1])


def waiting(connection: Connection, run: str) -> dict[Key, int]:
    """Keys of all that waits for a run, in the order of producers and their sequence, and the bytes of each."""
    size = sa.func.length(inbox.c.body)
    query = sa.select(inbox.c.producer, inbox.c.seq, size).where(inbox.c.run == run)
    found = connection.execute(query.order_by(inbox.c.producer, inbox.c.seq))
    return {(producer, seq): size for producer, seq, size in found}


def waiting_count(connection: Connection, run: str) -> int:
    """How many batches wait for a run."""
    query = sa.select(sa.func.count()).select_from(inbox).where(inbox.c.run == run)
    return int(connection.execute(query).scalar_one())


def load(connection: Connection, keys: list[Key]) -> list[Row[tuple[object, ...]]]:
    """The waiting batches of these keys, rows of `BATCH_COLUMNS`."""
    if not keys:
        return []
    chosen = sa.tuple_(inbox.c.producer, inbox.c.seq).in_(keys)
    # what SQLite finds by the index: of a list of pairs alone it goes through all that waits
    near = (inbox.c.producer.in_({key[0] for key in keys}), inbox.c.seq.in_({key[1] for key in keys}))
    query = _batches().where(*near, chosen).order_by(inbox.c.producer, inbox.c.seq)
    return list(connection.execute(query).all())


class Waiting(NamedTuple):
    """A table that waits to be folded: from which attempt on, and the size of its body."""

    key: Key
    first: int
    size_bytes: int


def foldable(connection: Connection, producer_id: int, end: int, last_seq: int) -> list[Waiting]:
    """A producer's waiting tables that hold an attempt before `end` which is in no chunk, in sequence.

    Arguments:
        last_seq: only up to this one: behind an outage far more may wait.
    """
    row = inbox.c
    which = (row.producer == producer_id, row.seq <= last_seq, row.kind != "events", row.first < end)
    unfolded = sa.or_(row.folded < end, row.last < end)
    query = sa.select(row.seq, row.first, row.folded, sa.func.length(row.body)).where(*which, unfolded)
    return [
        Waiting((producer_id, seq), max(first, folded), size)
        for seq, first, folded, size in connection.execute(query.order_by(row.seq)).all()
    ]


def first_waiting(connection: Connection, producer_id: int) -> int:
    """The lowest attempt of a producer that waits to be folded; MAX_ATTEMPT where none does."""
    row = inbox.c
    first = sa.case((row.first < row.folded, row.folded), else_=row.first)
    which = (row.producer == producer_id, row.kind != "events", row.last >= row.folded)
    found = connection.execute(sa.select(sa.func.min(first)).where(*which)).scalar()
    return MAX_ATTEMPT if found is None else int(found)


def batch_of(row: Row[tuple[object, ...]]) -> Batch:
    """A row of `BATCH_COLUMNS` as the batch that was sent."""
    got = row._mapping
    header = {name: got[name] for name in ("producer", "seq", "run", "rank", "kind", "digest", "body")}
    return Batch(version=FORMAT_VERSION, **header)


def unfolded_batch(row: Row[tuple[object, ...]]) -> Batch:
    """The part of a waiting batch that lies in no chunk, for whoever has been given the chunks."""
    batch, folded = batch_of(row), row._mapping["folded"]
    if batch.kind == "events" or folded == 0:
        return batch
    table = batch.table()
    rest = select(table, table["attempt"] >= folded)
    return pack_table(
        batch.kind, rest, producer=batch.producer, seq=batch.seq, run=batch.run, rank=batch.rank
    )


def decode(batch: Batch, shape: Array | None = None) -> Table:
    """The table of a batch as it will lie in chunks of level 0. Arguments: shape, as of `TailReader.decoded`."""
    rows = with_seq(batch)
    return with_lost_share(rows, shape) if batch.kind == "tensors" else rows


def _batches() -> sa.Select[tuple[object, ...]]:
    joined = inbox.join(producers, producers.c.id == inbox.c.producer)
    return sa.select(*BATCH_COLUMNS).select_from(joined)


def _keys(connection: Connection, *which: sa.ColumnElement[bool]) -> list[Key]:
    query = sa.select(inbox.c.producer, inbox.c.seq).where(*which).order_by(inbox.c.producer, inbox.c.seq)
    return [(row.producer, row.seq) for row in connection.execute(query)]


def _chosen(table: Table, names: Collection[str] | None, folded: int) -> Table:
    """What is read of a batch. Single columns are copied, so that the rest of it need not stay in memory."""
    if names is not None:
        table = {name: column.copy() for name, column in table.items() if name in names or name in KEYS}
    return select(table, table["attempt"] >= folded) if folded else table


def _size(table: Table) -> int:
    return int(np.sum([column.nbytes for column in table.values()]))
