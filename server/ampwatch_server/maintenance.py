"""A server's database, opened by who looks after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampwatch.errors import AmpwatchError

from .db import Database
from .settings import Settings


@contextmanager
def opened(settings: Settings, *, migrate: bool = True) -> Iterator[Database]:
    """The database of these settings. AmpwatchError where there is none: a name that is misspelt makes no new one.

    Arguments:
        migrate: bring its schema up to date, as a server does.
    """
    path = Path(str(settings.url.database))
    if settings.url.get_backend_name() == "sqlite" and not path.exists():
        raise AmpwatchError(f"{path}: there is no database; name a server's --database, or its --dir")
    database = Database(settings.url)
    try:
        if migrate:
            database.migrate()
        yield database
    finally:
        database.close()
