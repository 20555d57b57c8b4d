"""What a server does again and again beside its requests, each in a daemon thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from .writer import Unavailable

log = logging.getLogger(__name__)


class Chore:
    """Does something every so often until it is told to stop. What fails is logged, and tried again next time.

    Arguments:
        name: of the thread, and in the log.
        do: is called in the thread; it looks at `is_stopping` where it takes long.
        every_s: from the end of one time to the beginning of the next, s.
    """

    def __init__(self, name: str, do: Callable[[], object], every_s: float) -> None:
        self._name, self._do, self._every_s = name, do, every_s
        self._stopping: Final = threading.Event()
        self._wake: Final = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"ampwatch-{name}", daemon=True)

    def start(self) -> None:
        """Begin, with the first time at once."""
        self._thread.start()

    def hurry(self) -> None:
        """Do it now, and not at the end of the wait."""
        self._wake.set()

    def stop(self, patience_s: float | None = None) -> None:
        """End after what is under way; where that takes longer than `patience_s`, leave it to the end of the process."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def pause(self, wait_s: float) -> None:
        """Wait within a time, no longer than until `stop` is called."""
        self._stopping.wait(wait_s)

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self._do()
            except Unavailable as error:
                log.warning("%s: %s; trying again", self._name, error)
            except Exception:
                log.exception("%s: failed; trying again", self._name)
            if not self._stopping.is_set():  # told while the wish to wake was cleared
                self._wake.wait(self._every_s)
