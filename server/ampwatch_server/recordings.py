"""Recordings that were replayed lately: who moves a slider asks for the same run again and again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from ampwatch.replay.ceiling import Ceilings, ceilings
from ampwatch.replay.recording import Recording

from .db import Database
from .store.processes import EVERYONE, Source
from .store.recorded import read_recording, version_of
from .store.tail import TailReader

_KEPT_ATTEMPTS: Final = 4_000_000  # over all kept recordings; some 60 bytes each

_Key = tuple[str, Source, int]
_Version = tuple[float, int] | None


class Known(NamedTuple):
    """A recording and its ceilings."""

    recording: Recording
    ceilings: Ceilings


class Recordings:
    """Reads recordings, and keeps those of the runs that were asked for last, until they change."""

    def __init__(self, database: Database, tails: TailReader) -> None:
        self._database, self._tails = database, tails
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, tuple[_Version, Known]] = OrderedDict()

    def read(self, run: str, source: Source = EVERYONE, scaler: int = 0) -> Known:
        """The recording of a run as it stands. RunNotFound."""
        key = (run, source, scaler)
        with self._database.read() as connection:
            version = version_of(connection, run)
            with self._lock:
                kept = self._kept.get(key)
            if kept is not None and kept[0] == version:
                return kept[1]
            recording = read_recording(connection, self._tails, run, source, scaler)
        known = Known(recording, ceilings(recording.attempts))
        self._keep(key, version, known)
        return known

    def _keep(self, key: _Key, version: _Version, known: Known) -> None:
        with self._lock:
            self._kept[key] = (version, known)
            self._kept.move_to_end(key)
            while sum(one.recording.attempts.n for _, one in self._kept.values()) > _KEPT_ATTEMPTS:
                self._kept.popitem(last=False)
