"""A copy of a database that is in use."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL

from ampwatch.errors import AmpwatchError

_PAGES: Final = 1024  # copied in one go; between two the server writes
_PAUSE_S: Final = 0.01


def backup(url: URL, target: Path, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Copy a database as it is at one moment, while servers use it.

    Arguments:
        url: of SQLite, or of PostgreSQL, whose own `pg_dump` then makes a dump in its custom format.
        target: a file that is not there yet.
        progress: called with pages done and pages in all.
    Errors: AmpwatchError where the file exists, or cannot be written, or pg_dump is not there or fails.
    """
    if target.exists():
        raise AmpwatchError(f"{target}: it exists; name a new file")
    partial = target.with_name(f"{target.name}.partial")
    try:
        if url.get_backend_name() == "sqlite":
            _copy(Path(str(url.database)), partial, progress)
        else:
            _dump(url, partial)
        os.replace(partial, target)
    except (OSError, sqlite3.Error) as error:
        raise AmpwatchError(f"{target}: cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _copy(source: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    if not source.exists():
        raise AmpwatchError(f"{source}: there is no such database")
    reading, writing = (
        sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True),
        sqlite3.connect(target),
    )
    try:
        reading.execute("BEGIN")  # one snapshot: a copy of a database in use would start again at each write
        reading.execute("SELECT 1 FROM sqlite_master").fetchone()
        reading.backup(
            writing, pages=_PAGES, progress=lambda _, left, all_: progress(all_ - left, all_), sleep=_PAUSE_S
        )
    finally:
        writing.close()
        reading.close()
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _dump(url: URL, target: Path) -> None:
    program = shutil.which("pg_dump")
    plain = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    if program is None:
        raise AmpwatchError(
            "pg_dump is not on the PATH; PostgreSQL's own tool makes the copy: "
            f"pg_dump --format=custom --file={target.with_suffix('')} {plain.render_as_string()}"
        )
    command = [program, "--format=custom", f"--file={target}", f"--dbname={plain.render_as_string()}"]
    environ = os.environ | ({"PGPASSWORD": str(url.password)} if url.password else {})
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AmpwatchError(f"pg_dump failed: {done.stderr.strip()}")
