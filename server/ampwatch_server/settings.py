"""Settings of a server: where it stores, what it listens on, what it refuses."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from ampwatch.errors import SettingsError

from .destinations import AlertSettings

MEBIBYTE: Final = 1 << 20
_DIALECTS: Final = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


@dataclass(frozen=True)
class Keep:
    """What is dropped, and when; None keeps it. Counted from when a run was last heard of: what lives is left alone.

    Arguments:
        tensors_days: the rows of single tensors (their points, of 256 attempts each, stay).
        attempts_days: the rows of attempts (their points, of 16 attempts each, stay, and so do events).
        max_bytes: size of the database above which the same is dropped before its time, of the runs that were
            silent longest first: the rows of tensors, then those of attempts, and whole runs with their events last.
    """

    tensors_days: float | None = 7.0
    attempts_days: float | None = 90.0
    max_bytes: int | None = 64 << 30


@dataclass(frozen=True)
class Settings:
    """What a server may configure. Immutable; nothing is read from the environment after construction.

    Arguments:
        database: URL of a SQLite file or a PostgreSQL database; the path of a SQLite file will do.
        directory: spool directory to follow; None where batches come by HTTP only.
        host, port: what the server listens on; port 0 lets the system choose.
        root_path: path prefix under which a proxy shows the server, whether it strips it or not.
        allowed_hosts: names that the Host header may carry beside loopback, addresses and `host`.
        token_file: where the first token is kept, mode 0600; None makes one for this process only.
        max_body_bytes, max_decoded_bytes: bounds of a request's body, as sent and decompressed.
        max_pending_bytes: bodies that may wait for the disk before the server asks clients to come back.
        lease_s: how long a server may keep a run to itself without renewing.
        silent_s: silence after which a run without an end counts as crashed.
        stalled_s: time without an attempt, heartbeats going on, after which a run counts as stalled.
        keep: how long what is stored is kept, and how large the database may grow.
        token_per_s, producer_per_s: batches a second that one token, and one process, may send to this server in the
            long run; ten times as many at once.
        alerts: where findings are told.
        compactor: works in a thread of the server, or in a process of its own.
        clock: Unix time in seconds.
    """

    database: str
    directory: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8765
    root_path: str = ""
    allowed_hosts: tuple[str, ...] = ()
    token_file: Path | None = None
    max_body_bytes: int = 16 * MEBIBYTE
    max_decoded_bytes: int = 64 * MEBIBYTE
    max_pending_bytes: int = 256 * MEBIBYTE
    lease_s: float = 15.0
    silent_s: float = 180.0
    stalled_s: float = 600.0
    keep: Keep = field(default_factory=Keep)
    token_per_s: float = 20_000.0
    producer_per_s: float = 1_000.0
    alerts: AlertSettings = field(default_factory=AlertSettings)
    compactor: Literal["thread", "process"] = "thread"
    clock: Callable[[], float] = time.time

    @property
    def url(self) -> URL:
        """The database as a URL of a driver that the server knows."""
        return database_url(self.database)


def database_url(given: str) -> URL:
    """Read `--database`: a URL, or the path of a SQLite file. SettingsError names what is allowed."""
    if "://" not in given:
        return URL.create("sqlite", database=os.path.abspath(given))
    try:
        url = make_url(given)
        driver = _DIALECTS[url.drivername]
    except (ArgumentError, KeyError) as error:
        raise SettingsError(
            f"database: got {given.split(':', 1)[0]}://…, it must be sqlite:///file.db, "
            "postgresql://user@host/name or the path of a SQLite file"
        ) from error
    if driver == "sqlite" and url.database in (None, "", ":memory:"):
        raise SettingsError("database: SQLite in memory keeps nothing; name a file: sqlite:///ampwatch.db")
    return url.set(drivername=driver)


def default_database(directory: Path | None, environ: Mapping[str, str] | None = None) -> str:
    """Path of the SQLite file that a server uses when none is named.

    For a spool directory it lies in the user's cache folder, under a hash of the directory's real path: the
    directory itself is never changed, and the file can be made again from it. Without a directory it is the only
    copy, and lies in the user's data folder.
    """
    environ = os.environ if environ is None else environ
    if directory is None:
        return str(_base(environ, "XDG_DATA_HOME", ".local/share") / "ampwatch.db")
    name = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=8).hexdigest()
    return str(_base(environ, "XDG_CACHE_HOME", ".cache") / f"{name}.db")


def _base(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    given = environ.get(variable, "")
    return (Path(given) if given else Path.home() / fallback) / "ampwatch"
