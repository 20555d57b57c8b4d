"""A roll-out: servers of two versions on one database, which the newer has upgraded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sent
import sqlalchemy as sa
import zstandard
from test_migrations import at_the_first_schema
from typer.testing import CliRunner

from ampwatch import cli
from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.errors import AmpwatchError
from ampwatch_server import tables as t
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings
from ampwatch_server.store import codec
from ampwatch_server.store.runs import get_run
from ampwatch_server.store.series import Range
from ampwatch_server.store.tensors import read_histograms


@pytest.fixture
def older(database: str) -> sa.MetaData:
    """The tables as the first version knows them, in a database in use."""
    return at_the_first_schema(database)


@pytest.fixture
def newer(older: sa.MetaData, database: str) -> Iterator[Service]:
    """A server of this version, which has upgraded it."""
    service = Service(Settings(database=database, clock=lambda: 1e6), Diagnosis)
    yield service
    service.database.close()


def value_of(column: sa.Column[Any], run: str) -> object:
    """Something that fits a column; of what names a run or a producer that of the second run."""
    known = {"run": run, "producer": 2 if isinstance(column.type, sa.Integer) else sent.Q}
    plain = {str: "[]", bytes: b"\x80", bool: False, float: 1.0, int: 0}
    return known.get(column.name, plain[column.type.python_type])


def as_first_wrote_it(data: bytes) -> dict[str, list[float]]:
    """The reader of the first version: signed differences, no zigzag, histograms row by row."""
    found = {}
    for name, (dtype, stored, _, delta, _, packed) in msgspec.msgpack.decode(data).items():
        raw = np.frombuffer(zstandard.decompress(packed), np.uint8)
        flat = np.frombuffer(raw.reshape(np.dtype(stored).itemsize, -1).T.tobytes(), stored)
        found[name] = (np.cumsum(flat, dtype=np.int64) if delta else flat).astype(dtype).tolist()
    return found


def test_what_an_older_server_writes_and_reads_is_valid_sql(older: sa.MetaData, newer: Service) -> None:
    def job(connection: sa.Connection) -> None:
        for table in older.sorted_tables:
            if table.name != "alembic_version":
                row = {
                    column.name: value_of(column, "second") for column in table.columns if column.name != "id"
                }
                connection.execute(table.insert().values(row))
                assert row.items() <= dict(connection.execute(sa.select(table)).mappings().all()[-1]).items()

    newer.database.write(job)
    with newer.database.read() as connection:
        assert get_run(connection, newer.settings, "second")["producers"][0]["producer"] == sent.Q


def codecs(service: Service) -> set[int]:
    with service.database.read() as connection:
        return set(connection.scalars(sa.select(t.chunks.c.codec).union(sa.select(t.parts.c.codec))))


@pytest.mark.parametrize("database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
def test_until_the_older_are_gone_chunks_are_written_so_that_they_read_them(
    newer: Service, database: str
) -> None:
    found_inf = np.arange(3000) % 7 == 0
    sent.store(newer, sent.attempts(0, 3000, 1, found_inf=found_inf.astype(float), producer=sent.Q))
    with newer.database.read() as connection:
        chunk = connection.execute(sa.select(t.chunks.c.data).where(t.chunks.c.first == 1024)).scalar_one()
    read = as_first_wrote_it(chunk)
    assert (read["attempt"], read["loss"][:3]) == (list(range(1024, 2048)), [1024.0, 1025.0, 1026.0])
    assert codecs(newer) == {1}
    CliRunner().invoke(cli.app, ["db", "upgrade", "--finish", "--database", database], catch_exceptions=False)
    sent.store(newer, sent.attempts(3000, 5000, 2, producer=sent.Q))
    assert codecs(newer) == {1, codec.CODEC}
    assert sent.attempts_of(newer, "r") == 3 + 5000


def test_histograms_are_read_wherever_they_lie_and_move_once_the_older_are_gone(service: Service) -> None:
    service.database.write(lambda c: c.execute(t.formats.update().values(version=2)))
    sent.store(service, sent.attempts(0, 2100, 0), sent.tensors([5, 1500, 2050], [0, 0, 0], 1))
    assert (codecs(service), counted(service)) == ({2}, [90, 90, 90])
    service.database.finish_upgrade()
    sent.store(service, sent.tensors([6], [0], 2), sent.attempts(2100, 3100, 3))
    assert (codecs(service), counted(service)) == ({2, 3}, [180, 90, 90])  # 5 and 6 in one point
    with service.database.read() as connection:
        kinds = sa.select(t.chunks.c.first, t.chunks.c.codec, t.chunks.c.hist.is_not(None))
        found = connection.execute(kinds.where(t.chunks.c.kind == "tensors").order_by(t.chunks.c.first)).all()
    assert [tuple(row) for row in found] == [(0, 3, True), (1024, 2, False), (2048, 3, True)]


def counted(service: Service) -> list[int]:
    """The elements in each histogram of the first tensor."""
    with service.database.read() as connection:
        found = read_histograms(connection, service.tails, "r", 0, Range())
    return [sum(hist) for hist in found["hist"]]


def test_a_server_is_started_again_on_a_database_that_a_newer_one_has_upgraded(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.database.write(lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'"))
    service.database.write(lambda c: c.execute(t.formats.update().values(version=codec.CODEC + 1)))
    service.database.migrate()
    assert "was upgraded by a newer ampwatch; this one goes on with it" in caplog.text
    sent.store(service, sent.attempts(0, 1500))
    assert sent.attempts_of(service, "r") == 1500
    assert codecs(service) == {codec.CODEC}


def test_a_database_that_is_another_programs_says_so(service: Service) -> None:
    service.database.write(lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = 'later'"))
    with pytest.raises(AmpwatchError, match="is none of ampwatch's"):
        service.database.migrate()
