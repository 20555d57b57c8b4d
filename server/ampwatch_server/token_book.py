"""Tokens of programs as the command line manages them: on the database itself, whether a server runs or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.errors import AmpwatchError, SettingsError

from . import tables as t
from .auth import SCOPES, Auth
from .db import Database, text
from .settings import Settings, default_database


class TokenNotFound(AmpwatchError):
    """There is no token with this id."""


class TokenBook:
    """Issues, lists and revokes tokens in one database, whose URL it shows. A running server follows within seconds.

    Arguments:
        database, settings.
        auth: of a server that runs on it; it follows at once.
        who: whom the audit names.
    """

    def __init__(
        self, database: Database, settings: Settings, auth: Auth | None = None, who: str = "command line"
    ) -> None:
        self.database = settings.url.render_as_string(hide_password=True)
        self._database, self._who = database, who
        self._auth = auth or Auth(database, settings)

    def create(self, name: str, scopes: Iterable[str], project: str | None = None) -> str:
        """A new token's value, which is shown this once. SettingsError for a scope that there is not, or no name.

        Arguments:
            project: whose runs it is for; None: every one.
        """
        if project is not None and not project.strip():
            raise SettingsError("project: got an empty name; leave it out for a token of all projects")
        if not name.strip():
            raise SettingsError("name: got none; say what the token is for, such as the name of a cluster")
        wanted = list(dict.fromkeys(scopes))
        for scope in wanted:
            if scope not in SCOPES:
                raise SettingsError(f"scope: got {scope!r}, it must be one of {', '.join(SCOPES)}")
        its = None if project is None else text(project)
        value = self._auth.issue("token", text(name.strip()), wanted, project=its)
        self._database.write(lambda c: self._auth.note(c, self._who, "create", f"token {text(name.strip())}"))
        return value

    def list(self, after: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Tokens of programs: id, name, scopes (list), project (None: all), the Unix times at which it was made and used last (or None).

        Arguments:
            after, limit: only those with a higher id, and so many.
        """
        column = t.tokens.c
        query = sa.select(
            column.id, column.name, column.scopes, column.project, column.created, column.last_used
        )
        query = query.where(column.kind == "token", column.id > after).order_by(column.id).limit(limit)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return [dict(row) | {"scopes": row["scopes"].split()} for row in rows]

    def revoke(self, token: int) -> str:
        """Delete a token by its id; answer its name. TokenNotFound."""
        mine = (t.tokens.c.id == token) & (t.tokens.c.kind == "token")
        gone = t.tokens.delete().where(mine).returning(t.tokens.c.name)

        def job(connection: Connection) -> str | None:
            name: str | None = connection.execute(gone).scalar()
            if name is not None:
                self._auth.note(connection, self._who, "revoke", f"token {name} {token}")
            return name

        name = self._database.write(job)
        self._auth.forget()
        if name is None:
            raise TokenNotFound(
                f"token {token}: there is none with this id; `ampwatch token list` shows them"
            )
        return name


@contextmanager
def open_book(
    database: str | None, directory: Path | None = None, *, make: bool = False
) -> Iterator[TokenBook]:
    """The tokens of a server: that of a database's URL, else the one that `ampwatch serve [directory]` uses.

    Arguments:
        make: the database where there is none. A name that is misspelt is told from an empty one otherwise.
    Errors: AmpwatchError.
    """
    settings = Settings(database=database or default_database(directory))
    path = Path(str(settings.url.database))
    if not make and settings.url.get_backend_name() == "sqlite" and not path.exists():
        raise AmpwatchError(f"{path}: no server has kept its tokens there; name its --database, or its --dir")
    opened = Database(settings.url)
    try:
        opened.migrate()
        yield TokenBook(opened, settings)
    finally:
        opened.close()
