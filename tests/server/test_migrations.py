"""From the first schema up, with data in it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import sent
import sqlalchemy as sa
import zstandard
from alembic import command
from alembic.config import Config

import ampwatch_server
from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.errors import AmpwatchError
from ampwatch_server.db import Database
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings, database_url
from ampwatch_server.store.runs import get_run
from ampwatch_server.store.series import Range, read_series

EMPTY = b"\x80"
RUN = {"run": "r", "project": "", "given_name": "", "name": "old", "given_tags": "[]", "notes": "", "archived": False,
       "ended": True, "complete": True, "started": 1.0, "last_seen": 2.0, "last_attempt": 2.0}  # fmt: skip
STATE = {
    "run": "r",
    "holder": "",
    "lease_until": 0.0,
    "revision": 1,
    "changed": 2.0,
    "summary": EMPTY,
    "verdict": EMPTY,
}
PRODUCER = {"producer": sent.P, "run": "r", "rank": 0, "first_seen": 1.0, "last_seen": 2.0, "last_seq": 0,
            "received": 1, "end_attempt": 3, "rolled": 3, "attempts": 3, "skipped": 0, "finished": True,
            "announced": 3, "host": "h", "device": "cpu"}  # fmt: skip


def first_codec(**columns: list[int]) -> bytes:
    """Columns as the first version wrote them: signed differences."""
    packed = {
        name: (
            "<i8",
            "<i1",
            1,
            True,
            len(c),
            zstandard.compress(np.diff(c, prepend=0).astype("<i1").tobytes()),
        )
        for name, c in columns.items()
    }
    return msgspec.msgpack.encode(packed)


def at_the_first_schema(url: str) -> sa.MetaData:
    """A database of the first version with a run in it; its tables."""
    engine = sa.create_engine(database_url(url))
    config = Config()
    config.set_main_option("script_location", str(Path(ampwatch_server.__file__).parent / "migrations"))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.rollback()
        tables = sa.MetaData()
        tables.reflect(connection)
        chunk = {
            "producer": 1,
            "kind": "attempts",
            "stream": 0,
            "level": 0,
            "first": 0,
            "count": 3,
            "codec": 1,
        }
        chunk["data"] = first_codec(attempt=[0, 1, 2], scale=[8, 8, 4], seq=[0, 0, 0])
        for name, row in (("runs", RUN), ("run_state", STATE), ("producers", PRODUCER), ("chunks", chunk)):
            connection.execute(tables.tables[name].insert().values(row))
        connection.commit()
    engine.dispose()
    return tables


def test_from_the_first_schema_up_with_data_in_it(database: str) -> None:
    at_the_first_schema(database)
    service = Service(Settings(database=database, clock=lambda: 1e6), Diagnosis)
    sent.store(service, sent.attempts(3, 5, 1))
    with service.database.read() as connection:
        run = get_run(connection, service.settings, "r")
        found = read_series(connection, service.tails, "r", ["scale"], Range())["streams"][0]
    assert (run["name"], run["attempts"]) == ("old", 5)
    assert found["series"]["scale"]["mean"] == [8.0, 8.0, 4.0, 65536.0, 65536.0]
    service.database.close()


def test_a_large_database_is_left_to_a_person(database: str) -> None:
    at_the_first_schema(database)
    opened = Database(database_url(database))
    with pytest.raises(
        AmpwatchError, match=r"holds 0\.0 GB: it is not upgraded by itself.*ampwatch db upgrade"
    ):
        opened.migrate(largest_bytes=1000)
    opened.migrate(largest_bytes=None)
    opened.migrate(largest_bytes=1000)  # nothing is left to do
    opened.close()
