"""Handover: what was recorded offline, or never got through, to a server. Behind `ampwatch sync`.

The folder is only read; how far it has been read is kept in a file of the user's, one for each folder and server.
Batches go many in a request, in chunks of one request for each connection, and the place is kept after each chunk:
what is broken off goes on there, and a batch that is sent twice is stored once.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from . import answers, spool
from .answers import Answer
from .cuts import Cuts
from .errors import AmpwatchError, InvalidBatch, SettingsError
from .records import Batch
from .sender import Sender, together
from .spool import Tail

if TYPE_CHECKING:
    import httpx

CONNECTIONS: Final = 8
PATIENCE_S: Final = 300.0
FIRST_RETRY_S: Final = 0.5
LONGEST_RETRY_S: Final = 30.0
SILENT_S: Final = 600.0


class State(msgspec.Struct):
    """What is kept between two syncs of a folder with a server.

    Bytes read of each segment; by producer, how many batches were refused and how many records could not be read.
    """

    directory: str
    server: str
    offsets: dict[str, int] = {}
    refused: dict[str, int] = {}
    unreadable: dict[str, int] = {}


@dataclass
class Report:
    """What became of the batches; `refused` by reason; producers by their folder."""

    stored: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unreadable: int = 0
    deleted: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


class Handover:
    """One pass over a folder of recorded runs.

    Arguments:
        directory: the folder of all runs, of one run, or of one producer. RunNotFound where nothing was recorded.
        server, token: as in `Sender`. SettingsError for an address that nothing may be sent to.
        again: begin at the beginning, whatever was sent before.
        state_dir: folder of the kept places; the user's own if None.
        patience_s: how long a server that is not there is tried again.
        http: transport of httpx in place of the network.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        directory: Path,
        server: str,
        token: str | None,
        *,
        again: bool = False,
        state_dir: Path | None = None,
        patience_s: float = PATIENCE_S,
        http: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if why := answers.why_not(server):
            raise SettingsError(why)
        spool.run_directories(directory)  # RunNotFound where nothing was recorded
        self._directory, self._server, self._token = directory, server.rstrip("/"), token
        self._patience_s, self._http, self._clock = patience_s, http, clock
        self._path = _state_path(state_dir or _state_dir(), directory, self._server)
        self._state = State(str(directory.resolve()), self._server) if again else self._load()
        self._tail = Tail(directory, self._state.offsets)
        self._cuts: dict[str, Cuts] = {}
        self._held: set[Path] = set()  # folders of which what they hold was sent too
        self._lock = threading.Lock()
        self.report = Report()

    @property
    def left_bytes(self) -> int:
        """Bytes that are not sent yet."""
        read = self._tail.cursor
        sizes = {name: path.stat().st_size for name, path in spool.segments(self._directory).items()}
        return sum(max(0, size - read.get(name, 0)) for name, size in sizes.items())

    def send(self, progress: Callable[[], object] = lambda: None) -> Report:
        """Send everything that is complete now.

        Arguments:
            progress: called after each chunk.
        Errors: AmpwatchError where the server takes nothing; what was sent before is remembered.
        """
        with (
            Sender(self._server, self._token, http=self._http) as sender,
            ThreadPoolExecutor(CONNECTIONS) as pool,
        ):
            requests = together(self._batches())
            while chunk := list(islice(requests, CONNECTIONS)):
                for answered in list(pool.map(lambda batches: self._deliver(sender, batches), chunk)):
                    for batch, answer in answered:
                        self._count(batch, answer)
                self._save()
                progress()
        self._save()
        return self.report

    def delete(self) -> Report:
        """Delete the producers that have ended, or were silent for `SILENT_S`, and that the server has all of."""
        for folder in self._producers():
            name = folder.relative_to(self._directory).as_posix()
            if why := self._why_keep(folder):
                self.report.kept[name] = why
                continue
            shutil.rmtree(folder)
            self.report.deleted.append(name)
            if folder != self._directory and not any(folder.parent.iterdir()):
                folder.parent.rmdir()
        self._save()
        return self.report

    def _producers(self) -> list[Path]:
        return sorted({path.parent for path in spool.segments(self._directory).values()})

    def _batches(self) -> Iterator[Batch]:
        for folder in self._producers():
            yield from self._batches_of(folder)

    def _batches_of(self, folder: Path) -> Iterator[Batch]:
        yield from self._new_batches_of(folder)
        is_readable = not self._state.unreadable.get(folder.resolve().name)
        if is_readable and self._is_over(folder) and (held := spool.held(folder)) is not None:
            self._held.add(folder)
            yield held

    def _new_batches_of(self, folder: Path) -> Iterator[Batch]:
        while True:
            try:
                yield from self._tail.read_producer(folder)
                return
            except InvalidBatch:  # the tail stands behind it
                self.report.unreadable += 1
                producer = folder.resolve().name
                self._state.unreadable[producer] = self._state.unreadable.get(producer, 0) + 1

    def _deliver(self, sender: Sender, batches: list[Batch]) -> list[tuple[Batch, Answer]]:
        """The batches, each with its answer once that is one that lasts. Patience is for a time without any."""
        answered: list[tuple[Batch, Answer]] = []
        deadline, retry_s, left = time.monotonic() + self._patience_s, FIRST_RETRY_S, batches
        while True:
            told = sender.send_all(left, self._cuts_of)
            tried = list(zip(left, told, strict=False))  # it may end with one behind which none was
            lasting = [(batch, answer) for batch, answer in tried if not answer.comes_again]
            left = [batch for batch, answer in tried if answer.comes_again] + left[len(told) :]
            answered += lasting
            if not left:
                return answered
            if lasting:
                deadline, retry_s = time.monotonic() + self._patience_s, FIRST_RETRY_S
            _wait([answer for answer in told if answer.comes_again], retry_s, deadline)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    def _count(self, batch: Batch, answer: Answer) -> None:
        if answer.outcome == "stored":
            self.report.stored += 1
        else:
            self.report.refused[answer.warning] += 1
            self._state.refused[batch.producer] = self._state.refused.get(batch.producer, 0) + 1

    def _cuts_of(self, batch: Batch) -> Cuts:
        """How batches of its producer are cut."""
        with self._lock:
            if batch.producer not in self._cuts:
                folder, beside = self._folder_of(batch), self._path.with_suffix("") / batch.producer
                numbers = _Numbers(folder, beside, self._is_over)
                self._cuts[batch.producer] = Cuts(folder, numbers.following, beside=beside)
            return self._cuts[batch.producer]

    def _is_over(self, folder: Path) -> bool:
        """Whether a producer gives no numbers any more."""
        return _has_ended(folder) or self._silent_s(folder) >= SILENT_S

    def _silent_s(self, folder: Path) -> float:
        return self._clock() - max(path.stat().st_mtime for path in folder.glob("*.awb"))

    def _folder_of(self, batch: Batch) -> Path:
        """The folder of a batch's producer, wherever in the tree of folders this one is."""
        below = (self._directory / batch.run / batch.producer, self._directory / batch.producer)
        return next((folder for folder in below if folder.is_dir()), self._directory)

    def _why_keep(self, folder: Path) -> str:
        """Why a producer's folder must stay; empty where it need not."""
        producer = folder.resolve().name
        if refused := self._state.refused.get(producer):
            return f"{refused} of its batches were refused"
        if unreadable := self._state.unreadable.get(producer):
            return f"{unreadable} of its records cannot be read; a newer ampwatch wrote them, or they are damaged"
        if any(Tail(self._directory, self._tail.cursor).read_producer(folder)):
            return "it has written more meanwhile"
        if folder not in self._held and spool.held(folder) is not None:
            return "it holds events that it may still send itself"
        if damaged := spool.damaged(folder):
            return f"{', '.join(sorted(path.name for path in damaged))} cannot be read to the end"
        if not self._is_over(folder):
            return f"it has not ended, and wrote {max(0.0, self._silent_s(folder)):.0f} s ago"
        return ""

    def _load(self) -> State:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError):
            return State(str(self._directory.resolve()), self._server)

    def _save(self) -> None:
        there = spool.segments(self._directory)
        self._state.offsets = {name: end for name, end in self._tail.cursor.items() if name in there}
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(self._state))
        new.replace(self._path)


def _wait(again: list[Answer], retry_s: float, deadline: float) -> None:
    """Wait until what has to come again may. AmpwatchError where it need not be tried, or was for long enough."""
    left_s = deadline - time.monotonic()
    for answer in again:
        if answer.outcome == "barred" or left_s <= 0:
            raise AmpwatchError(f"{answer.warning}. What was sent before is remembered: sync again")
    pauses = [answer.pause_s for answer in again if answer.pause_s is not None]
    time.sleep(min(left_s, max(pauses, default=retry_s * random.SystemRandom().uniform(0.5, 1.0))))


class _Numbers:
    """Sequence numbers behind all that a producer has given, for the parts of its batches. Any thread."""

    def __init__(self, folder: Path, beside: Path, is_over: Callable[[Path], bool]) -> None:
        self._folder, self._beside, self._is_over = folder, beside, is_over
        self._lock = threading.Lock()
        self._last: int | None = None

    def following(self) -> int | None:
        """The next one; None where the producer may still give it, or not all that it has given can be read."""
        with self._lock:
            try:
                if self._last is None and self._is_over(self._folder):
                    given = (batch.seq for batch in spool.read(self._folder))
                    self._last = max(Cuts(self._folder, beside=self._beside).last_seq, *given)
            except InvalidBatch:
                return None
            self._last = None if self._last is None else self._last + 1
            return self._last


def _has_ended(folder: Path) -> bool:
    """Whether a producer has said that it ends: its footer is in the last of its event segments."""
    segments = sorted(folder.glob("events-*.awb"))
    return bool(segments) and any(
        event.type == "finish" for batch in spool.read_segment(segments[-1]) for event in batch.events()
    )


def _state_dir(environ: Mapping[str, str] | None = None) -> Path:
    base = (os.environ if environ is None else environ).get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ampwatch"


def _state_path(state_dir: Path, directory: Path, server: str) -> Path:
    name = hashlib.blake2b(f"{directory.resolve()}\n{server}".encode(), digest_size=8).hexdigest()
    return state_dir / f"sync-{name}.json"
