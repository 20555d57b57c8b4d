"""Tokens of programs as the command line manages them: on the database itself, whether a server runs or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ampwatch.errors import AmpwatchError, SettingsError

from . import tables as t
from .auth import SCOPES, Auth
from .db import Database
from .settings import Settings, default_database


class TokenBook:
    """Issues, lists and revokes tokens in one database. A running server follows within seconds."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._auth = Auth(database, settings)

    def create(self, name: str, scopes: Iterable[str]) -> str:
        """A new token's value, which is shown this once. SettingsError for a scope that there is not."""
        wanted = list(dict.fromkeys(scopes))
        for scope in wanted:
            if scope not in SCOPES:
                raise SettingsError(f"scope: got {scope!r}, it must be one of {', '.join(SCOPES)}")
        return self._auth.issue("token", name, wanted)

    def list(self) -> list[dict[str, Any]]:
        """Every token of a program: id, name, scopes (list) and the Unix time at which it was made."""
        column = t.tokens.c
        query = sa.select(column.id, column.name, column.scopes, column.created).order_by(column.id)
        with self._database.read() as connection:
            rows = connection.execute(query.where(column.kind == "token")).mappings().all()
        return [dict(row) | {"scopes": row["scopes"].split()} for row in rows]

    def revoke(self, token: int) -> None:
        """Delete a token by its id. AmpwatchError where there is none."""
        mine = (t.tokens.c.id == token) & (t.tokens.c.kind == "token")
        if self._database.write(lambda c: c.execute(t.tokens.delete().where(mine)).rowcount) == 0:
            raise AmpwatchError(
                f"token {token}: there is none with this id; `ampwatch token list` shows them"
            )


@contextmanager
def open_book(database: str | None, directory: Path | None = None) -> Iterator[TokenBook]:
    """The tokens of a server: that of a database's URL, else the one that `ampwatch serve [directory]` uses."""
    settings = Settings(database=database or default_database(directory))
    opened = Database(settings.url)
    try:
        opened.migrate()
        yield TokenBook(opened, settings)
    finally:
        opened.close()
