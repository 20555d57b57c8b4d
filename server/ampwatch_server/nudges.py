"""Nudges: a server that got a batch of a run which another works on lets that one know, through PostgreSQL's NOTIFY.

Without one (a pooler that passes no notifications on, a server just starting) the other finds the batch at its next
look, seconds later. Several servers share a SQLite file only where they share a machine, and look.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa

from .chore import Chore
from .db import Database

log = logging.getLogger(__name__)

_CHANNEL: Final = "ampwatch_news"
_WAIT_S: Final = 1.0  # for news, before it is seen whether the server stops
_AGAIN_S: Final = 10.0  # after a connection that was lost


class Nudges:
    """Tells other servers of runs, and hears of them in a thread.

    Arguments:
        database.
        heard: called with each run that a server has told of, this one too.
    """

    def __init__(self, database: Database, heard: Callable[[str], None]) -> None:
        self._database, self._heard = database, heard
        self._is_possible = database.url.get_backend_name() == "postgresql"
        self._chore = Chore("nudges", self._listen, _AGAIN_S)

    def start(self) -> None:
        """Begin to listen."""
        if self._is_possible:
            self._chore.start()

    def stop(self) -> None:
        """End the thread. One that waits for a database that does not answer is left to the end of the process."""
        self._chore.stop(2 * _WAIT_S)

    def tell(self, run: str) -> None:
        """There is something new of a run. Not waited for."""
        if self._is_possible:
            notify = sa.select(sa.func.pg_notify(_CHANNEL, run))
            self._database.submit(lambda connection: connection.execute(notify))

    def _listen(self) -> None:
        try:
            self._listen_on()
        except Exception as error:  # noqa: BLE001 - whatever the driver raises: the other way remains
            log.warning("no news from other servers: %s; trying again", error)

    def _listen_on(self) -> None:
        own = sa.create_engine(self._database.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        with own.connect() as connection:
            connection.exec_driver_sql(f"LISTEN {_CHANNEL}")
            driver: Any = connection.connection.driver_connection
            while not self._chore.is_stopping():
                for notice in driver.notifies(timeout=_WAIT_S):
                    self._heard(notice.payload)
