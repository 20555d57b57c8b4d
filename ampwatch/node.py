"""Node: in a job of many ranks one process of each machine sends what all of its processes record.

The processes of a machine find each other in a folder of their own in its temporary folder, mode 0700: a file for
each producer that says where its spool lies, and one that the sender touches at every flush. Who sees no fresh one
(the sender has died, the temporary folder is not shared) sends for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from .records import Batch
from .spool import Tail

RANKS_THAT_SEND: Final = 64  # a job of no more: each rank for itself
FRESH_S: Final = 60.0
_LOCAL_RANK: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_SENDER: Final = "sender"
_LEFT: Final = ".left"
_NEW: Final = ".new"


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Which process of its machine this is, as launchers say it; None where none does."""
    environ = os.environ if environ is None else environ
    given = next((environ[name] for name in _LOCAL_RANK if environ.get(name)), "")
    return int(given) if given.isdecimal() else None


class Node:
    """One process of a machine, among the others of its run.

    Arguments:
        run: of the job. producer, folder: this process's, and its spool.
        is_sender: whether it is the one that sends.
        base: folder that the processes of a machine share.
        clock: Unix time in seconds, that of files' times.

    Errors: OSError where the folder cannot be made, or is another user's.
    """

    def __init__(
        self,
        run: str,
        producer: str,
        folder: Path,
        *,
        is_sender: bool,
        base: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.is_sender, self._clock = is_sender, clock
        self._begun = clock()
        self._folder = folder.absolute()
        self._place = _place(base or Path(tempfile.gettempdir()), run)
        self._mark = self._place / (_SENDER if is_sender else producer)
        self.stay()
        self._tails: dict[str, Tail] = {}
        self._held: Batch | None = None
        self._again: deque[str] = deque()

    def stay(self) -> None:
        """Show that this process is there, also to who clears a temporary folder of what is old."""
        try:
            os.utime(self._mark)
        except FileNotFoundError:
            _make_own(self._place)
            new = self._mark.with_suffix(_NEW)
            new.write_text(str(self._folder))
            new.replace(self._mark)  # nobody finds it half written

    @property
    def is_served(self) -> bool:
        """Whether the sender is at work; at the beginning it may not be there yet."""
        try:
            last = (self._place / _SENDER).stat().st_mtime
        except FileNotFoundError:
            last = self._begun
        return self._clock() - last < FRESH_S

    def forward(self, submit: Callable[[Batch], bool]) -> bool:
        """Hand on what the other processes have written; False where not all was taken, and is offered again."""
        while self._again:
            self._tails.pop(self._again.popleft(), None)
        for mark in [mark for mark in self._place.iterdir() if mark.stem != _SENDER and mark.suffix != _NEW]:
            with contextlib.suppress(FileNotFoundError):  # it is leaving
                tail = self._tails.setdefault(mark.stem, Tail(Path(mark.read_text())))
                if not self._forward(tail, submit):
                    return False
                if mark.suffix == _LEFT:
                    mark.unlink()
                    del self._tails[mark.stem]
        return True

    def forward_again(self, producer: str) -> None:
        """Hand on from its beginning what another process has written, as far as it is still there. Any thread."""
        self._again.append(producer)

    @property
    def is_alone(self) -> bool:
        """Whether every other process has left, and all that it wrote was handed on."""
        return not self._tails and self._held is None

    def leave(self) -> None:
        """Say that nothing more comes from here; the sender reads what is left."""
        if not self.is_sender and (self._place / _SENDER).exists():
            self._mark.rename(self._mark.with_suffix(_LEFT))
            return
        self._mark.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are still there
            self._place.rmdir()

    def _forward(self, tail: Tail, submit: Callable[[Batch], bool]) -> bool:
        if self._held is not None and not submit(self._held):
            return False
        self._held = None
        for batch in tail.read():
            if not submit(batch):
                self._held = batch
                return False
        return True


def _place(base: Path, run: str) -> Path:
    name = hashlib.blake2b(run.encode(), digest_size=8).hexdigest()
    return base / f"ampwatch-{os.getuid()}-{name}"


def _make_own(folder: Path) -> None:
    """Make a folder that no other user can read or has laid there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    there = folder.lstat()
    if there.st_uid != os.getuid() or there.st_mode & 0o077:
        raise PermissionError(13, "it is another user's", str(folder))
