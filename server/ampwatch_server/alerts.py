"""Alerts: findings that a destination wants to know of, through an outbox in the database.

An alert is written beside the finding, in the same transaction, once for a finding and a destination. Any server
sends it; which one does so claims it for a minute first. What a destination does not take is tried again for a day,
ever more rarely. One that does not answer is left alone for a minute, whatever waits for it: each try costs seconds,
and others wait.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from ampwatch.diagnosis.findings import Finding

from . import tables as t
from .chore import Chore
from .db import Database, upsert
from .destinations import AlertSettings, Destination, NoAnswer, NotSent, send
from .settings import Settings
from .store.blob import jsonable, pack, unpack
from .writer import Unavailable

log = logging.getLogger(__name__)

POLL_S: Final = 5.0
STOP_S: Final = 5.0
CLAIM_S: Final = 60.0  # longer than a request may take
SILENT_S: Final = 60.0
FIRST_RETRY_S: Final = 10.0
LONGEST_RETRY_S: Final = 3600.0
GIVE_UP_S: Final = 86400.0
OLD_S: Final = 86400.0  # findings of a run that has been silent for so long are no news


class Alerts:
    """The outbox of one server.

    Arguments:
        database, settings.
        post: sends a message to a destination and answers what became of it. NotSent.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        post: Callable[[Destination, dict[str, Any]], str] = send,
    ) -> None:
        self._database, self._clock, self._post = database, settings.clock, post
        self._settings: AlertSettings = settings.alerts
        self._silent: dict[str, float] = {}  # destinations that did not answer, and when they are asked again
        self._chore = Chore("alerts", self.send_due, POLL_S)

    def start(self) -> None:
        """Begin to send, where there is anywhere to send to."""
        if self._settings.destinations:
            self._chore.start()

    def stop(self) -> None:
        """End after the request under way, or without it where that takes long: what was not sent stays in the outbox."""
        self._chore.stop(STOP_S)

    def note(self, connection: Connection, run: str, findings: Iterable[Finding]) -> None:
        """Write the alerts that findings call for into the outbox, in the transaction that stores them."""
        pairs = [(f, d) for f in findings for d in self._settings.destinations if d.wants(f.kind, f.severity)]
        if not pairs or not self._is_news(connection, run):
            return
        silenced = _silenced(connection, run)
        rows = [self._row(run, f, d) for f, d in pairs if not silenced & {f.key, f.kind}]
        if rows:
            connection.execute(upsert(connection, t.outbox).on_conflict_do_nothing(), rows)
            self._chore.hurry()

    def send_due(self) -> int:
        """Send what is due; answer how many alerts were tried."""
        tried = 0
        while not self._chore.is_stopping() and (alert := self._database.write(self._claim)) is not None:
            self._try(alert)
            tried += 1
        return tried

    def test(self, name: str) -> str:
        """Send a message that says that it is a test to one of `names`. NotSent."""
        destination = self._destinations[name]
        return self._post(destination, _message(destination, "This is a test of ampwatch's alerts.", {}, ""))

    def shown(self, connection: Connection) -> list[dict[str, Any]]:
        """The destinations, without their URLs, each with how many alerts wait, were sent and were given up."""
        return [_shown(connection, d) for d in self._settings.destinations]

    @property
    def names(self) -> list[str]:
        """Names of the destinations."""
        return list(self._destinations)

    @property
    def _destinations(self) -> dict[str, Destination]:
        return {d.name: d for d in self._settings.destinations}

    def _claim(self, connection: Connection) -> Row[Any] | None:
        """The alert that has been due for longest, which no other server tries for a while."""
        now = self._clock()
        asked = [name for name in self.names if not now < self._silent.get(name, now) <= now + SILENT_S]
        mine = sa.and_(t.outbox.c.due <= now, t.outbox.c.destination.in_(asked))
        query = sa.select(t.outbox).where(mine).order_by(t.outbox.c.due).limit(1)
        if (row := connection.execute(query).one_or_none()) is None:
            return None
        claim = t.outbox.update().where(t.outbox.c.id == row.id, t.outbox.c.due == row.due)
        claimed = connection.execute(claim.values(due=now + CLAIM_S, tries=row.tries + 1)).rowcount == 1
        return row if claimed else self._claim(connection)

    def _try(self, alert: Row[Any]) -> None:
        destination = self._destinations[alert.destination]
        try:
            outcome, due = self._post(destination, self._message_of(alert, destination)), None
        except NotSent as error:
            outcome, due = str(error), self._next_try(alert)
            log.warning("alert to %s: %s%s", destination.name, error, "" if due else "; given up")
            if isinstance(error, NoAnswer):
                self._leave_alone(destination)
        except Unavailable:
            raise
        except Exception:  # it stops none of the others, nor is it tried for ever
            outcome, due = "failed; the server's log says why", self._next_try(alert)
            log.exception("alert to %s failed", destination.name)
        mine = t.outbox.update().where(t.outbox.c.id == alert.id, t.outbox.c.due.is_not(None))
        self._database.write(lambda c: c.execute(mine.values(due=due, outcome=outcome)))

    def _leave_alone(self, destination: Destination) -> None:
        """Ask nothing of it for a while; what is too old by then would never have its turn."""
        now = self._clock()
        self._silent[destination.name] = now + SILENT_S
        box = t.outbox.c
        old = (box.destination == destination.name, box.due.is_not(None), box.created < now - GIVE_UP_S)
        given_up = t.outbox.update().where(*old).values(due=None, outcome="no answer")
        self._database.write(lambda connection: connection.execute(given_up))

    def _next_try(self, alert: Row[Any]) -> float | None:
        now = self._clock()
        if now - alert.created > GIVE_UP_S:
            return None
        wait = min(LONGEST_RETRY_S, FIRST_RETRY_S * 3.0 ** min(alert.tries, 20))
        due: float = now + wait * random.uniform(0.75, 1.25)
        return due

    def _message_of(self, alert: Row[Any], destination: Destination) -> dict[str, Any]:
        name = sa.func.coalesce(t.runs.c.name, t.runs.c.given_name)
        query = sa.select(t.runs.c.run, t.runs.c.project, name.label("name")).where(t.runs.c.run == alert.run)
        with self._database.read() as connection:
            run = dict(connection.execute(query).mappings().one_or_none() or {"run": alert.run})
        finding = jsonable(unpack(alert.body))
        base = self._settings.link.rstrip("/")
        link = f"{base}/run/{alert.run}?finding={alert.key}" if base else ""
        return _message(destination, finding["headline"], {**run, "finding": finding}, link)

    def _row(self, run: str, finding: Finding, destination: Destination) -> dict[str, Any]:
        now = self._clock()
        about = {"run": run, "key": finding.key, "destination": destination.name}
        return about | {
            "body": pack(finding.as_dict()),
            "created": now,
            "due": now,
            "tries": 0,
            "outcome": "",
        }

    def _is_news(self, connection: Connection, run: str) -> bool:
        seen = connection.execute(sa.select(t.runs.c.last_seen).where(t.runs.c.run == run)).scalar()
        return seen is not None and seen > self._clock() - OLD_S


def _message(destination: Destination, sentence: str, about: dict[str, Any], link: str) -> dict[str, Any]:
    if destination.shape == "json":
        return {"source": "ampwatch", "text": sentence, "link": link or None, **about}
    finding = about.get("finding")
    head = f"*{finding['severity']}* in {about.get('name') or about['run']}: " if finding else ""
    told = _slack_text(head + sentence)
    return {"text": f"{told}\n<{link}|Open the run>" if link else told}


def _slack_text(plain: str) -> str:
    """Text in which Slack finds no links or mentions."""
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _silenced(connection: Connection, run: str) -> set[str]:
    """Keys of the findings that people have marked, and kinds of those that they have muted."""
    mark = t.finding_marks.c
    rows = connection.execute(sa.select(mark.key, mark.kind, mark.mark).where(mark.run == run)).all()
    return {row.key for row in rows} | {row.kind for row in rows if row.mark == "muted"}


def _shown(connection: Connection, destination: Destination) -> dict[str, Any]:
    mine = t.outbox.c.destination == destination.name
    sent = t.outbox.c.outcome.startswith("answered 2")
    counts = sa.select(
        sa.func.count(t.outbox.c.due).label("waiting"),
        sa.func.count().filter(sa.and_(t.outbox.c.due.is_(None), sent)).label("sent"),
        sa.func.count().filter(sa.and_(t.outbox.c.due.is_(None), sa.not_(sent))).label("not_sent"),
    ).where(mine)
    last = sa.select(t.outbox.c.outcome).where(mine, t.outbox.c.tries > 0).order_by(t.outbox.c.id.desc())
    return {
        "name": destination.name,
        "shape": destination.shape,
        "severity": destination.severity,
        "kinds": list(destination.kinds),
        **connection.execute(counts).mappings().one(),
        "last_outcome": connection.execute(last.limit(1)).scalar(),
    }
