"""Tokens, sessions and one-time links: who may do what. Only hashes are stored; values are never logged.

A program sends `Authorization: Bearer <token>`. A browser opens the one-time link that the server prints, and gets
a cookie for it. Scopes: `read` (every GET), `write` (sending batches), `admin` (editing and deleting,
and all of the others). A token may be for the runs of one project only: it sees no other, and what it sends first
belongs to that project, whatever the job says.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ampwatch.errors import SettingsError

from . import tables as t
from .db import Database, upsert
from .settings import Settings

COOKIE: Final = "ampwatch_session"
SCOPES: Final = ("read", "write", "admin")
SESSION_S: Final = 30 * 86400.0
LINK_S: Final = 86400.0
_CACHE_S: Final = 5.0  # a token that another server revoked is refused after so long
_MISS_S: Final = (
    0.5  # one that another server issued is known after so long; no guesser asks the database more often
)
_DAY_S: Final = 86400.0
_USED_S: Final = 3600.0
_USED_KEPT: Final = 4096
_USE_KEPT_S: Final = 90 * _DAY_S

Scope = str


class Grant(NamedTuple):
    """What a token, session or link stands for. Its value is not known, only its hash."""

    id: int
    kind: str
    name: str
    hash: str
    scopes: frozenset[str]
    expires: float | None
    project: str | None = None  # whose runs it is for; None: every one

    @property
    def who(self) -> str:
        """How the audit calls it."""
        return f"{self.kind} {self.name} {self.id}"


class Auth:
    """Checks and issues tokens. Arguments: database, settings."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held while the database is asked; who knows enough goes past it
        self._grants: list[Grant] = []
        self._read_at = float("-inf")
        self._used: dict[tuple[int, str], float] = {}

    def issue(
        self,
        kind: str,
        name: str,
        scopes: Iterable[Scope],
        lifetime_s: float | None = None,
        *,
        project: str | None = None,
    ) -> str:
        """A new token, session or link of these scopes, for all runs or those of a project; its value, shown this once."""
        value = secrets.token_urlsafe(32)
        self.admit(value, kind, name, scopes, lifetime_s, project=project)
        return value

    def admit(
        self,
        value: str,
        kind: str,
        name: str,
        scopes: Iterable[Scope],
        lifetime_s: float | None = None,
        *,
        project: str | None = None,
    ) -> None:
        """Let a value be a token, session or link; nothing where it is one already.

        Sessions and links that have expired are deleted by the way: browsers come and go, and every miss reads all.
        """
        now = self._settings.clock()
        row = {
            "kind": kind,
            "name": name,
            "hash": _hash(value),
            "scopes": " ".join(scopes),
            "project": project,
            "created": now,
            "expires": None if lifetime_s is None else now + lifetime_s,
        }

        def job(connection: Connection) -> None:
            ended = sa.and_(t.tokens.c.kind.in_(("session", "link")), t.tokens.c.expires < now)
            connection.execute(t.tokens.delete().where(ended))
            connection.execute(upsert(connection, t.tokens).values(row).on_conflict_do_nothing())

        self._database.write(job)
        self.forget()

    def find(self, value: str, kind: str) -> Grant | None:
        """What a value stands for; None where it is none of this kind, or has expired. Constant in time."""
        given = _hash(value)
        found = _match(self._known(_CACHE_S), given, kind) or _match(self._known(_MISS_S), given, kind)
        return None if found is None or self._is_over(found) else found

    @property
    def is_fresh(self) -> bool:
        """Whether what is known is believed without asking the database."""
        return time.monotonic() - self._read_at <= _CACHE_S

    def known(self, value: str) -> Grant | None:
        """What `find` would find for a token, where the database need not be asked; else None."""
        found = _match(self._grants, _hash(value), "token") if self.is_fresh else None
        return None if found is None or self._is_over(found) else found

    def holds(self, grant: Grant) -> bool:
        """Whether a grant that was found still stands: it was not revoked, and has not expired."""
        return grant in self._known(_CACHE_S) and not self._is_over(grant)

    def redeem(self, code: str) -> str | None:
        """A session for a one-time link's code, which is spent by it; None where there is no such link."""
        link = self.find(code, "link")
        if link is None or not self._database.write(lambda c: self._spend(c, link)):
            return None
        return self.issue("session", "browser", SCOPES, SESSION_S)

    def note(self, connection: Connection, who: str, action: str, subject: str) -> None:
        """Write down who did what, in the transaction that does it."""
        entry = {"time": self._settings.clock(), "who": who, "action": action, "subject": subject}
        connection.execute(t.audit.insert().values(entry))

    def used(self, grant: Grant, address: str) -> None:
        """Note that a token or session was used from an address: at most once an hour, and never waited for.

        The audit gets a line for each address and day; after 90 days it is deleted.
        """
        now, key = self._settings.clock(), (grant.id, address)
        with self._lock:
            if abs(now - self._used.get(key, float("-inf"))) < _USED_S:
                return
            if len(self._used) >= _USED_KEPT:
                self._used.clear()
            self._used[key] = now
        self._database.submit(lambda connection: self._note_use(connection, grant, address, now))

    def _note_use(self, connection: Connection, grant: Grant, address: str, now: float) -> None:
        mine = t.tokens.update().where(t.tokens.c.id == grant.id)
        connection.execute(mine.values(last_used=now))
        use = t.audit.c.action == "use"
        told = sa.select(t.audit.c.id).where(use, t.audit.c.who == grant.who, t.audit.c.subject == address)
        if connection.execute(told.where(t.audit.c.time > now - _DAY_S).limit(1)).first() is None:
            connection.execute(t.audit.delete().where(use, t.audit.c.time < now - _USE_KEPT_S))
            self.note(connection, grant.who, "use", address)

    def _spend(self, connection: Connection, link: Grant) -> bool:
        spent = connection.execute(t.tokens.delete().where(t.tokens.c.id == link.id)).rowcount == 1
        if spent:
            self.note(connection, link.who, "open", "one-time link")
        return spent

    def _is_over(self, grant: Grant) -> bool:
        return grant.expires is not None and grant.expires < self._settings.clock()

    def _known(self, at_most_s: float) -> list[Grant]:
        now = time.monotonic()
        if now - self._read_at > at_most_s:
            with self._reading:
                if now - self._read_at > at_most_s:  # nobody has read them meanwhile
                    self._grants, self._read_at = self._load(), now
        return self._grants

    def _load(self) -> list[Grant]:
        row = t.tokens.c
        query = sa.select(row.id, row.kind, row.name, row.hash, row.scopes, row.expires, row.project)
        with self._database.read() as connection:
            return [
                Grant(g.id, g.kind, g.name, g.hash, frozenset(g.scopes.split()), g.expires, g.project)
                for g in connection.execute(query)
            ]

    def forget(self) -> None:
        """Read the tokens anew at the next question."""
        with self._reading:
            self._read_at = float("-inf")


def first_token(auth: Auth, path: Path | None) -> str:
    """The token of this user's own programs: the one in `path`, made at the first start; without a path a new one.

    Errors: SettingsError where the file cannot be written, or others may read it.
    """
    if path is None:
        return auth.issue("token", "this process", SCOPES)
    try:
        value = _read_or_create(path)
    except OSError as error:
        raise SettingsError(f"token: {path} cannot be used: {error.strerror}") from error
    auth.admit(value, "token", "first", SCOPES)
    return value


def _match(grants: list[Grant], hashed: str, kind: str) -> Grant | None:
    found = None
    for grant in grants:  # to the end: how long it takes tells nothing
        if hmac.compare_digest(grant.hash, hashed) and grant.kind == kind:
            found = grant
    return found


def _read_or_create(path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read_private(path)
    value = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(value + "\n")
    return value


def _read_private(path: Path) -> str:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise SettingsError(
            f"token: {path} has mode {mode:04o}: others can read it; chmod 600 it, or delete it"
        )
    value = path.read_text(encoding="utf-8").strip()
    if len(value) < 16:
        raise SettingsError(f"token: {path} holds no token; delete it and a new one will be made")
    return value


def _hash(value: str) -> str:
    """Tokens are 256 random bits: a plain hash keeps them, there is nothing to guess."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
