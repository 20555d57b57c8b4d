"""The database: one connection that writes, durably, and many that only read.

SQLite and PostgreSQL by the same code. What is committed is on the disk: `synchronous=FULL` and
`synchronous_commit=on` are set *and read back* on the very connection that acknowledges batches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.sql.compiler import SQLCompiler

from ampwatch.errors import AmpwatchError, MissingExtra
from ampwatch.filesystems import network_mount

from .store.codec import CODEC
from .tables import metadata
from .writer import Unavailable, Writer, told_when_unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

AUTOMATIC_BYTES: Final = 1_000_000_000  # a larger database is upgraded by `ampwatch db upgrade` only

_BODIES: Final = (
    ("chunks", "data"),
    ("chunks", "hist"),
    ("parts", "data"),
    ("parts", "hist"),
    ("inbox", "body"),
    ("events", "body"),
    ("receipts", "digest"),
)
_BUSY_MS: Final = 10_000
_READERS: Final = 16
_SQLITE_FULL: Final = 2
# what a connection notes of itself: the identities of the files that it has opened, by path
_FILES: Final = "ampwatch_files"


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
            folder = Path(str(url.database)).parent
            _make_folder(folder)
            _refuse_network(folder)
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

    def migrate(self, *, largest_bytes: int | None = AUTOMATIC_BYTES) -> None:
        """Bring the schema up to this version of ampwatch. One at a time, also over several servers.

        One that is ahead of this version is left as it is: steps only add, so that a server of the version before can
        be started again while others are newer already.

        Arguments:
            largest_bytes: a database that is larger is not changed: that can take long, and belongs to a person.
        Errors: AmpwatchError where the database cannot be opened, is too large, or is not one of this version's.
        """
        shown = self.url.render_as_string(hide_password=True)
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        try:
            with self._writing.connect() as connection:
                if _is_ahead(connection, config):
                    log.warning("%s was upgraded by a newer ampwatch; this one goes on with it", shown)
                    return
                if largest_bytes is not None and _is_behind(connection, config):
                    _refuse_larger(connection, largest_bytes, shown)
                connection.rollback()
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except sa.exc.DatabaseError as error:
            raise AmpwatchError(f"database: cannot open {shown}: {error.orig}") from error
        except CommandError as error:
            raise AmpwatchError(f"database: {shown} is none of ampwatch's: {error}") from error

    def finish_upgrade(self) -> None:
        """No older server uses this database any more: write what only those of this version read."""
        newest = metadata.tables["formats"].update().values(version=CODEC)
        self.write(lambda connection: connection.execute(newest))

    def close(self) -> None:
        """Finish the queued writes and close every connection."""
        self.writer.close()
        self._reading.dispose()
        self._writing.dispose()


def used_bytes(connection: Connection, exact_above: int = 2**63) -> int:
    """Bytes that the tables hold, as far as the disk knows; what was deleted does not count.

    Arguments:
        exact_above: of PostgreSQL the files are measured, which do not shrink by themselves. Where they are larger
            than this, what they hold is counted, which reads all of it.
    """
    if connection.dialect.name == "sqlite":
        pages, free, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)
    files = sum(
        connection.execute(
            sa.select(sa.func.pg_total_relation_size(sa.func.to_regclass(table.name)))
        ).scalar()
        or 0
        for table in metadata.sorted_tables
    )
    if files <= exact_above:
        return int(files)
    bodies = (metadata.tables[name].c[column] for name, column in _BODIES)
    exact = [connection.execute(sa.select(sa.func.sum(sa.func.pg_column_size(c)))).scalar() for c in bodies]
    return sum(int(size or 0) for size in exact)


def upsert(connection: Connection, table: sa.Table) -> Any:
    """An INSERT of the connection's own dialect, which knows `on_conflict_do_update` and `…_nothing`."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


class Prepared:
    """A statement without a result, for many rows, that is compiled once for each kind of database.

    SQLAlchemy looks at each value of each row on its way to the driver; for short rows that takes longer than to write
    them. Arguments: statement, whose values the driver takes as they are.
    """

    def __init__(self, statement: sa.UpdateBase) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, list[str] | None]] = {}

    def execute(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        """Run it for each row: a value for each name of its parameters."""
        dialect = connection.dialect
        if dialect.name not in self._compiled:
            compiled = self._statement.compile(dialect=dialect, column_keys=list(rows[0]))
            assert isinstance(compiled, SQLCompiler)
            self._compiled[dialect.name] = str(compiled), compiled.positiontup
        string, names = self._compiled[dialect.name]
        values = rows if names is None else [tuple(row[name] for name in names) for row in rows]
        connection.exec_driver_sql(string, values)


def text(value: object, limit: int = 1024) -> str:
    """A value as text that both databases store: no NUL (PostgreSQL), no lone surrogate, at most `limit` long."""
    plain = str(value).encode("utf-8", "replace").decode("utf-8")
    return plain.replace("\x00", "\N{REPLACEMENT CHARACTER}")[:limit]


def _is_ahead(connection: Connection, config: Config) -> bool:
    """Whether a step was taken that this version does not know: they are numbered."""
    heads = MigrationContext.configure(connection).get_current_heads()
    known = ScriptDirectory.from_config(config).get_heads()
    return any(head.isdecimal() and head > max(known) for head in heads)


def _is_behind(connection: Connection, config: Config) -> bool:
    """Whether a database that is not new lacks a step."""
    heads = MigrationContext.configure(connection).get_current_heads()
    return bool(heads) and set(heads) != set(ScriptDirectory.from_config(config).get_heads())


def _refuse_larger(connection: Connection, largest_bytes: int, shown: str) -> None:
    size = used_bytes(connection)
    if size > largest_bytes:
        raise AmpwatchError(
            f"database: {shown} is of an older ampwatch and holds {size / 1e9:.1f} GB: it is not upgraded by itself. "
            f"Keep a copy (`ampwatch db backup`), then run `ampwatch db upgrade --database {shown}`"
        )


def _refuse_network(folder: Path) -> None:
    if (mount := network_mount(folder)) is not None:
        raise AmpwatchError(
            f"database: {folder} lies on a network file system ({mount.kind}, mounted at {mount.place}), where "
            "SQLite's write-ahead log can lose what was acknowledged. Name a file on a local disk with --database "
            "(as /var/tmp/ampwatch.db), or a PostgreSQL database"
        )


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
        if not reads:
            sa.event.listen(engine, "commit", _refuse_changed)
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


def _open_sqlite_writing(connection: Any, record: Any) -> None:
    # auto_vacuum is only heard before the file has its first page, which journal_mode writes
    _open_sqlite(connection, "auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL")
    found = connection.execute("PRAGMA synchronous").fetchone()[0]
    if found != _SQLITE_FULL:
        raise AmpwatchError(
            f"database: SQLite refuses synchronous=FULL (it is {found}); nothing would be durable"
        )
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    record.info[_FILES] = {path: _identity(path)}


def _begin_writing(connection: Connection) -> None:
    if _changed(connection):
        # What was deleted is still open here: what stood in the log only goes into the file before it is gone for good.
        connection.exec_driver_sql("PRAGMA wal_checkpoint")
        _refuse_changed(connection)
    connection.exec_driver_sql("BEGIN IMMEDIATE")  # to wait for the lock here, not to fail at the first write


def _refuse_changed(connection: Connection) -> None:
    """Commit into no file that has been deleted or replaced: SQLite would, and it would be gone with the process."""
    if changed := _changed(connection):
        raise Unavailable(
            f"the database cannot be used now: {changed[0]} was deleted or replaced since it was opened; "
            "put it back, or start the server again"
        )
    files = connection.info[_FILES]
    log_path = f"{next(iter(files))}-wal"  # there from the first transaction on
    files.setdefault(log_path, _identity(log_path))


def _changed(connection: Connection) -> list[str]:
    """The files that are not those which a connection has opened."""
    return [path for path, opened in connection.info[_FILES].items() if _identity(path) != opened]


def _identity(path: str) -> tuple[int, int] | None:
    try:
        there = os.stat(path)
    except OSError:
        return None
    return there.st_dev, there.st_ino


def _open_postgres_writing(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
        found = cursor.execute("SHOW synchronous_commit").fetchone()[0]
    connection.commit()
    if found != "on":
        raise AmpwatchError(f"database: PostgreSQL refuses synchronous_commit=on (it is {found})")


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
