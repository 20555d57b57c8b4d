"""The compactor in a process of its own, so that what it does holds up neither acknowledgements nor reads.

It is started by a server and ends with it, however that ends: its standard input is closed then. It is what another
server on the same database would be, without HTTP. The two speak in lines of JSON. Down go the settings, once, and
what is new of which run; up come the runs that have changed, counts, how far it lags behind, and what it logs.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

import msgspec

from .agenda import New
from .alerts import Alerts
from .chore import Chore
from .compactor import Compactor
from .db import Database
from .destinations import AlertSettings
from .diagnoser import windowed
from .metrics import Labels, Metrics
from .settings import Settings
from .store.tail import TailReader

log = logging.getLogger(__name__)

TOLD_S: Final = 1.0  # between two words of how far it lags
SILENT_S: Final = 5.0  # without one it is taken to do nothing
STOP_S: Final = 20.0  # for the look under way; then it is killed, and its leases run out
FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    1.0,
    60.0,
)  # before one that has ended is started again: twice as long each time …
STEADY_S: Final = 60.0  # … that it had not worked for so long
WAITING: Final = 10_000  # lines; what is more the other finds by looking
_PROGRAM: Final = "import sys; sys.path[:] = {}; from ampwatch_server.companion import main; main()"


class Setup(msgspec.Struct, frozen=True):
    """What a compactor needs to know of a server's settings."""

    database: str
    alerts: AlertSettings
    lease_s: float
    silent_s: float
    stalled_s: float

    @classmethod
    def of(cls, settings: Settings) -> Setup:
        """Of the settings of a server."""
        return cls(**{name: getattr(settings, name) for name in cls.__struct_fields__})

    def settings(self) -> Settings:
        """The settings of the other process."""
        return Settings(**{name: getattr(self, name) for name in self.__struct_fields__})


class Told(msgspec.Struct, omit_defaults=True):
    """A line that comes up: any of these.

    Arguments:
        changed: a run whose summary and findings may be new.
        count: name, value and label of a counter.
        lag_s: how long the oldest news has waited to become visible.
        log: level, logger and text.
    """

    changed: str | None = None
    count: tuple[str, float, Labels] | None = None
    lag_s: float | None = None
    log: tuple[int, str, str] | None = None


class Companion:
    """Starts the other process, again where it ends, and has what a `Compactor` has for those who announce and ask.

    Arguments:
        settings.
        changed: called with each run whose summary and findings may be new.
        metrics: takes the counts.
    """

    def __init__(self, settings: Settings, changed: Callable[[str], None], metrics: Metrics) -> None:
        self._setup, self._changed, self._metrics = Setup.of(settings), changed, metrics
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lag_s, self._told_at = 0.0, time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # of the input of the process
        self._keeper = threading.Thread(target=self._keep, name="ampwatch-companion", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name="ampwatch-announcements", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._keeper.start()
        self._sender.start()

    def announce(self, news: Mapping[str, Sequence[New]]) -> None:
        """These batches of these runs are new. Never blocks: what finds no room is found by the other's sweep."""
        if self._lines.qsize() < WAITING:
            self._lines.put(_line(news))

    def lag_s(self) -> float:
        """How long the oldest news has waited to become visible, s. It grows while the other process is silent."""
        silent_s = time.monotonic() - self._told_at
        return self._lag_s if silent_s < SILENT_S else self._lag_s + silent_s

    def stop(self) -> None:
        """Let it finish the look under way and give its leases back."""
        self._stopping.set()
        self._lines.put(None)
        if not self._keeper.is_alive():
            return
        self._keeper.join(STOP_S)
        if self._keeper.is_alive() and self._process is not None:
            log.warning("the compactor is still at work after %.0f s; its process is killed", STOP_S)
            self._process.kill()
        self._keeper.join()
        self._sender.join()

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                status = self._work_with_one()
            except OSError as error:
                status = str(error)
            if self._stopping.is_set():
                return
            steady = time.monotonic() > began + STEADY_S
            pause_s = FIRST_PAUSE_S if steady else min(2 * pause_s, LONGEST_PAUSE_S)
            self._metrics.add("ampwatch_compactor_restarts_total")
            log.error("the compactor's process ended (%s); another is started in %.0f s", status, pause_s)
            self._stopping.wait(pause_s)

    def _work_with_one(self) -> str:
        """Start the process and hear it to its end; answers how it ended."""
        # the server's own path: with -m a file of the working directory would come before the module of its name
        command = [sys.executable, "-c", _PROGRAM.format(sys.path)]
        pipe = subprocess.PIPE  # the terminal's Ctrl-C is for the server: it comes in a session of its own
        with self._lock:
            if self._stopping.is_set():
                return "not started"
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
            self._process = process
            self._write(_line(self._setup))  # before any announcement
        assert process.stdout is not None
        ended = (BrokenPipeError, msgspec.DecodeError)  # amid a line of ours, on closing too, or of its own
        with suppress(*ended), process:
            for line in process.stdout:
                self._hear(msgspec.json.decode(line, type=Told))
        return f"exit status {process.returncode}"

    def _hear(self, told: Told) -> None:
        if told.changed is not None:
            self._changed(told.changed)
        if told.count is not None:
            self._metrics.add(*told.count)
        if told.lag_s is not None:
            self._lag_s, self._told_at = told.lag_s, time.monotonic()
        if told.log is not None:
            level, name, text = told.log
            logging.getLogger(name).log(level, "%s", text)

    def _send_all(self) -> None:
        while (line := self._lines.get()) is not None:
            with self._lock:
                self._write(line)
        with self._lock, suppress(OSError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def _write(self, line: bytes) -> None:
        """Under the lock. One that has ended is told nothing: the next begins with looking."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(line)
                self._process.stdin.flush()


class _Upwards(logging.Handler):
    """The way up, for lines of the log and all else. Any thread."""

    def __init__(self, out: IO[bytes]) -> None:
        super().__init__()
        self._out, self._lock = out, threading.Lock()
        self.setFormatter(logging.Formatter())  # with the traceback

    def tell(self, told: Told) -> None:
        """Send a line. A server that is gone hears of nothing, and is told apart by its closed input."""
        with self._lock, suppress(BrokenPipeError):
            self._out.write(_line(told))
            self._out.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Log there."""
        self.tell(Told(log=(record.levelno, record.name, self.format(record))))


def _line(what: Any) -> bytes:
    return msgspec.json.encode(what) + b"\n"


def main() -> None:
    """Work until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server decides when it is time
        signal.signal(number, signal.SIG_IGN)
    upwards = _Upwards(os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else that is printed gets between the lines
    logging.basicConfig(handlers=[upwards], level=logging.INFO)
    lines = sys.stdin.buffer
    if not (first := lines.readline()):  # the server is gone already
        return
    settings = msgspec.json.decode(first, type=Setup).settings()
    database = Database(settings.url)
    compactor = Compactor(
        database,
        settings,
        TailReader(),
        windowed,
        changed=lambda run: upwards.tell(Told(changed=run)),
        found=Alerts(database, settings).note,
        count=lambda *count: upwards.tell(Told(count=count)),
    )
    lag = Chore("lag", lambda: upwards.tell(Told(lag_s=compactor.lag_s())), TOLD_S)
    compactor.start()
    lag.start()
    for line in lines:
        compactor.announce(msgspec.json.decode(line, type=dict[str, list[New]]))
    lag.stop()
    compactor.stop()
    database.close()
