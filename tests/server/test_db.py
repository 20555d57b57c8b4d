from __future__ import annotations

import pytest
import sent
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.errors import AmpwatchError, SettingsError
from ampwatch_server import tables as t
from ampwatch_server.db import Database, text
from ampwatch_server.lease import Lease
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings, database_url, default_database
from ampwatch_server.writer import Unavailable


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
        pytest.raises((sa.exc.DBAPIError, Unavailable), match=r"readonly|read-only"),
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
    (tmp_path / "b.db").write_text("notes of mine")
    for name, told in (("a.db", "unable to open database file"), ("b.db", "file is not a database")):
        database = Database(database_url(str(tmp_path / name)))
        with pytest.raises(AmpwatchError, match=rf"cannot open sqlite:///.*{name}: {told}"):
            database.migrate()
        database.close()


def test_a_folder_that_cannot_be_made_says_so(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AmpwatchError, match=r"cannot make the folder .*file: (File exists|Not a directory)"):
        Database(database_url(str(tmp_path / "file" / "a.db")))


def test_a_full_database_is_told_from_a_bug(tmp_path) -> None:
    service = Service(Settings(str(tmp_path / "a.db")), Diagnosis)
    sent.allow_pages(service.database, 1)
    batch = sent.attempts(0, 3000)
    with pytest.raises(Unavailable, match="cannot be used now: database or disk is full"):
        service.inbox.append(batch, check(batch)).result()
    service.database.close()


@pytest.mark.parametrize("become", ["deleted", "replaced"])
def test_a_file_that_is_not_there_any_more_takes_nothing(tmp_path, become: str) -> None:
    service = Service(Settings(str(tmp_path / "a.db")), Diagnosis)
    batches = [sent.attempts(i, i + 1, seq=i) for i in range(3)]
    sent.store(service, batches[0], fold=False)
    (tmp_path / "a.db").rename(tmp_path / "away.db")
    if become == "replaced":
        (tmp_path / "a.db").touch()
    with pytest.raises(Unavailable, match="was deleted or replaced since it was opened"):
        sent.store(service, batches[1], fold=False)
    (tmp_path / "away.db").rename(tmp_path / "a.db")
    sent.store(service, *batches)
    assert sent.attempts_of(service, "r") == 3
    service.database.close()


def test_what_stands_in_a_log_that_was_deleted_is_saved(tmp_path) -> None:
    service = Service(Settings(str(tmp_path / "a.db")), Diagnosis)
    batches = [sent.attempts(i, i + 1, seq=i) for i in range(3)]
    sent.store(service, *batches[:2], fold=False)
    (tmp_path / "a.db-wal").unlink()
    with pytest.raises(Unavailable, match=r"a\.db-wal was deleted or replaced since it was opened"):
        sent.store(service, batches[2], fold=False)
    (tmp_path / "a.db").rename(tmp_path / "b.db")  # all that a killed server leaves
    again = Service(Settings(str(tmp_path / "b.db")), Diagnosis)
    new = [again.inbox.append(batch, check(batch)).result().new for batch in batches]
    assert new == [False, False, True]
    for each in (service, again):
        each.database.close()


def test_a_server_is_ready_where_it_can_write(service: Service) -> None:
    service.prove_ready()
    sqlite = service.settings.url.get_backend_name() == "sqlite"
    read_only = "PRAGMA query_only = on" if sqlite else "SET default_transaction_read_only = on"
    service.database.write(lambda connection: connection.exec_driver_sql(read_only))
    service.prove_ready()  # asked a moment ago
    service._ready_until = 0.0
    with pytest.raises(Unavailable, match=r"cannot be used now: .*(readonly|read-only)"):
        service.prove_ready()


def test_a_lease_from_before_the_clock_was_set_back_is_not_waited_for(
    service: Service, clock: list[float]
) -> None:
    sent.store(service, sent.attempts(0, 3))
    clock[0] -= 7200
    other = Lease("r", "another server", service.settings)
    assert service.database.write(other.acquire)
    clock[0] += 1
    third = Lease("r", "a third", service.settings)
    assert not service.database.write(third.acquire)


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
