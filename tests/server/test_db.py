from __future__ import annotations

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from ampwatch.errors import AmpwatchError, SettingsError
from ampwatch_server import tables as t
from ampwatch_server.db import Database, text
from ampwatch_server.service import Service
from ampwatch_server.settings import database_url, default_database


def test_the_acknowledging_connection_is_durable(service: Service) -> None:
    sqlite = service.settings.url.get_backend_name() == "sqlite"
    asked = "PRAGMA synchronous" if sqlite else "SHOW synchronous_commit"
    found = service.database.write(lambda c: c.exec_driver_sql(asked).scalar())
    assert found == (2 if sqlite else "on")


def test_sqlite_is_opened_as_the_design_says(tmp_path) -> None:
    database = Database(database_url(str(tmp_path / "a.db")))
    database.migrate()
    pragmas = ("journal_mode", "auto_vacuum", "foreign_keys")
    found = [database.write(lambda c, p=p: c.exec_driver_sql(f"PRAGMA {p}").scalar()) for p in pragmas]
    assert found == ["wal", 2, 1]
    database.close()


def test_a_reader_cannot_write(service: Service) -> None:
    with (
        pytest.raises(sa.exc.DBAPIError, match=r"readonly|read-only"),
        service.database.read() as connection,
    ):
        connection.execute(t.audit.insert().values(time=0.0, who="", action="", subject=""))


def test_a_job_that_fails_leaves_nothing(service: Service) -> None:
    def job(connection: sa.Connection) -> None:
        connection.execute(t.audit.insert().values(time=0.0, who="", action="", subject=""))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        service.database.write(job)
    with service.database.read() as connection:
        assert connection.execute(sa.select(t.audit)).all() == []


def test_the_migrations_make_the_tables(service: Service) -> None:
    service.database.migrate()  # again: nothing to do
    found = service.database.write(lambda c: compare_metadata(MigrationContext.configure(c), t.metadata))
    assert found == []


def test_a_database_that_cannot_be_opened_says_which(tmp_path) -> None:
    (tmp_path / "a.db").mkdir()
    database = Database(database_url(str(tmp_path / "a.db")))
    with pytest.raises(AmpwatchError, match=r"cannot open sqlite:///.*a\.db: unable to open"):
        database.migrate()
    database.close()


@pytest.mark.parametrize("url", ["mysql://a/b", "sqlite://", "sqlite:///:memory:", "://"])
def test_a_database_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="database: "):
        database_url(url)


def test_database_urls() -> None:
    assert database_url("postgresql://u@h/d").drivername == "postgresql+psycopg"
    assert database_url("/tmp/x.db").database == "/tmp/x.db"


def test_default_database_lies_in_the_users_folders(tmp_path) -> None:
    environ = {"XDG_CACHE_HOME": "/cache", "XDG_DATA_HOME": "/data"}
    assert default_database(None, environ) == "/data/ampwatch/ampwatch.db"
    one, other = default_database(tmp_path / "a", environ), default_database(tmp_path / "b", environ)
    assert one.startswith("/cache/ampwatch/")
    assert one != other


def test_text_that_postgresql_would_refuse() -> None:
    assert text("a\x00b\ud800c", 4) == "a\N{REPLACEMENT CHARACTER}b?"
