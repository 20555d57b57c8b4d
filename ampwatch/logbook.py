"""What `ampwatch.log` is told, and which attempt it belongs to. Torch-free.

    log(step=…) ─ scale() … log(loss=…) … update() ─ log(reward=…) ─ scale() …
        │                       │                        │
    the attempt that     the one under way      the one just finished, as long as
    begins next (1)                             its row is open: until the next begins

(1) for names that were first logged before the first attempt: what is logged at the top of a training loop.
"""

from __future__ import annotations

import re
from typing import Any, Final

from .notices import warn

MAX_NAMES: Final = 128


class Entry:
    """The values of one attempt; they may come after the attempt has ended, until the entry is closed."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.is_open = True

    def put(self, name: str, value: float) -> bool:
        """Add a value; False if that was too late."""
        self._values[name] = value
        return self.is_open  # asked last: what was open is in what close() gives

    def close(self) -> dict[str, float]:
        """The values by name, complete from now on. Any thread."""
        self.is_open = False
        return dict(self._values)


class Logbook:
    """Sorts what is logged by attempts. Training thread only."""

    def __init__(self) -> None:
        self._coming = Entry()  # of the attempt that is under way, or else begins next
        self._finished: Entry | None = None  # of the last one, until the next begins
        self._has_begun = False
        self._ahead: set[str] = set()  # names that speak of the attempt that begins next
        self._names: set[str] = set()
        self._warned: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        """Keep a number; what is none, or would have to be fetched from a device, gives one warning for its name."""
        name = re.sub(r"[^A-Za-z0-9_./ -]", "_", name)[:64] or "_"
        if name not in self._names and len(self._names) >= MAX_NAMES:
            self._warn(name, f"more than {MAX_NAMES} names")
            return
        self._names.add(name)
        try:
            number = _number(value)
            number = int(number) if name == "step" else number
        except Exception as error:  # noqa: BLE001 - it is the user's object that raises
            self._warn(name, str(error))
            return
        self._put(name, number)

    def begin(self) -> None:
        """A loss is scaled: an attempt is under way."""
        self._has_begun = True
        if self._finished is not None:
            self._finished.close()
            self._finished = None

    def end(self) -> Entry:
        """The attempt has ended: its entry, which stays open for what is logged before the next begins."""
        self._finished, self._coming = self._coming, Entry()
        return self._finished

    def _put(self, name: str, number: float) -> None:
        if not self._has_begun:
            self._ahead.add(name)
        if self._finished is None or name in self._ahead or not self._finished.put(name, number):
            self._coming.put(name, number)

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned and len(self._warned) < MAX_NAMES:
            self._warned.add(name)
            warn("log(%s=…) is not recorded: %s", name, why)


def _number(value: Any) -> float:
    """A number of Python or numpy, or a tensor or array with one element, as a float. Synchronises with no device."""
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device != "cpu":
        raise ValueError(
            f"it lies on {device}, and reading it would stop the device; .item() does so on purpose"
        )
    if hasattr(value, "detach"):
        value = value.detach()  # torch warns where a number is made of a tensor that requires a gradient
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (str, bytes)):
        raise TypeError(f"a number is wanted, got {value!r:.40}")
    return float(value)
