"""The database: one connection that writes, durably, and many that only read.

SQLite and PostgreSQL by the same code. What is committed is on the disk: `synchronous=FULL` and
`synchronous_commit=on` are set *and read back* on the very connection that acknowledges batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine

from ampwatch.errors import AmpwatchError, MissingExtra

from .writer import Writer, told_when_unavailable

T = TypeVar("T")

_BUSY_MS: Final = 10_000
_READERS: Final = 16
_SQLITE_FULL: Final = 2


class Database:
    """A database that is open for reading and writing.

    Arguments:
        url: of a SQLite file (its folder is made) or a PostgreSQL database.
    Errors: MissingExtra where the driver of PostgreSQL is not installed; AmpwatchError where the folder cannot be
    made.
    """

    def __init__(self, url: URL) -> None:
        self.url = url
        if url.get_backend_name() == "sqlite":
            _make_folder(Path(str(url.database)).parent)
        self._writing = _engine(url, reads=False)
        self._reading = _engine(url, reads=True)
        self.writer = Writer(self._writing)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that can only read, on one snapshot: what the compactor moves meanwhile is seen once.

        Errors: Unavailable.
        """
        with told_when_unavailable(), self._reading.connect() as connection, connection.begin():
            yield connection

    def submit(self, job: Callable[[Connection], T]) -> Future[T]:
        """Queue a job for the writing thread; the future resolves after the commit, or holds Unavailable."""
        return self.writer.submit(job)

    def write(self, job: Callable[[Connection], T]) -> T:
        """Run a job in the writing thread and wait for its commit."""
        return self.submit(job).result()

    def migrate(self) -> None:
        """Bring the schema up to this version of ampwatch. One at a time, also over several servers.

        Errors: AmpwatchError where the database cannot be opened, or is not one of this version's.
        """
        shown = self.url.render_as_string(hide_password=True)
        try:
            with self._writing.connect() as connection:
                config = Config()
                config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except sa.exc.DatabaseError as error:
            raise AmpwatchError(f"database: cannot open {shown}: {error.orig}") from error
        except CommandError as error:
            raise AmpwatchError(
                f"database: {shown} was made by another version of ampwatch, perhaps a newer one: {error}"
            ) from error

    def close(self) -> None:
        """Finish the queued writes and close every connection."""
        self.writer.close()
        self._reading.dispose()
        self._writing.dispose()


def upsert(connection: Connection, table: sa.Table) -> Any:
    """An INSERT of the connection's own dialect, which knows `on_conflict_do_update` and `…_nothing`."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


def text(value: object, limit: int = 1024) -> str:
    """A value as text that both databases store: no NUL (PostgreSQL), no lone surrogate, at most `limit` long."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return plain.replace("\x00", "\N{REPLACEMENT CHARACTER}")[:limit]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AmpwatchError(f"database: cannot make the folder {folder}: {error.strerror}") from error


def _engine(url: URL, *, reads: bool) -> Engine:
    options: dict[str, Any] = {
        "pool_size": _READERS if reads else 1,
        "max_overflow": 2 * _READERS if reads else 1,
    }
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, **options)
        sa.event.listen(engine, "connect", _open_sqlite_reading if reads else _open_sqlite_writing)
        sa.event.listen(engine, "begin", _begin_reading if reads else _begin_writing)
        return engine
    if reads:
        options |= {"isolation_level": "REPEATABLE READ", "execution_options": {"postgresql_readonly": True}}
    try:
        engine = sa.create_engine(url, pool_pre_ping=True, **options)
    except ImportError as error:
        raise MissingExtra("PostgreSQL", "postgres") from error
    if not reads:
        sa.event.listen(engine, "connect", _open_postgres_writing)
    return engine


def _open_sqlite(connection: Any, *pragmas: str) -> None:
    connection.isolation_level = None  # the driver would begin transactions of its own, and late
    for pragma in (f"busy_timeout={_BUSY_MS}", "foreign_keys=ON", *pragmas):
        connection.execute(f"PRAGMA {pragma}").close()


def _open_sqlite_reading(connection: Any, _record: Any) -> None:
    _open_sqlite(connection, "query_only=ON")


def _open_sqlite_writing(connection: Any, _record: Any) -> None:
    # auto_vacuum is only heard before the file has its first page, which journal_mode writes
    _open_sqlite(connection, "auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL")
    found = connection.execute("PRAGMA synchronous").fetchone()[0]
    if found != _SQLITE_FULL:
        raise AmpwatchError(
            f"database: SQLite refuses synchronous=FULL (it is {found}); nothing would be durable"
        )


def _open_postgres_writing(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
        found = cursor.execute("SHOW synchronous_commit").fetchone()[0]
    connection.commit()
    if found != "on":
        raise AmpwatchError(f"database: PostgreSQL refuses synchronous_commit=on (it is {found})")


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _begin_writing(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")  # to wait for the lock here, not to fail at the first write
