"""Real databases: a SQLite file, and where one answers a schema of its own on PostgreSQL; real servers on port 0."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch_server.serve import Running, running
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))  # sent.py, which the tests here share

POSTGRES = os.environ.get("AMPWATCH_TEST_POSTGRES", "postgresql+psycopg://postgres@127.0.0.1:5432/test")


@cache
def _postgres() -> sa.Engine | None:
    engine = sa.create_engine(POSTGRES, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 2})
    try:
        engine.connect().close()
    except sa.exc.OperationalError:
        return None
    return engine


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ampwatch.db'}"
        return
    engine = _postgres()
    if engine is None:
        pytest.skip(f"no PostgreSQL answers at {POSTGRES}")
    schema = f"t{uuid.uuid4().hex}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
        yield f"{POSTGRES}?options=-csearch_path%3D{schema}"
        connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
def clock() -> list[float]:
    """The server's clock: `clock[0]` is now."""
    return [1_000_000.0]


@pytest.fixture
def service(database: str, clock: list[float]) -> Iterator[Service]:
    """A store without HTTP, whose compactor works only when a test calls `process`."""
    service = Service(Settings(database=database, clock=lambda: clock[0]), Diagnosis)
    yield service
    service.database.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """A server on a free port, on SQLite."""
    with running(database=f"sqlite:///{tmp_path / 'ampwatch.db'}") as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    """Who holds the server's token."""
    with client_of(server) as client:
        yield client


@pytest.fixture
def connect() -> Callable[[Running], httpx.Client]:
    """Makes a client that holds a server's token."""
    return client_of


def client_of(server: Running) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"})
