"""Cuts: batches that were too large for the server or a proxy before it, in parts.

A part is a batch of its own. The first keeps the number of the whole, the other takes a new one, so that no gap is
left; which one is written down beside the spool before any is sent, so that whoever sends the batch again (a retry,
`ampwatch sync`) sends the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import records, spool
from .records import Batch


class Cuts:
    """The cuts of one producer's batches.

    Arguments:
        folder: the producer's folder; None where there is none, and they are kept in memory only.
        next_seq: gives the next sequence number, None where it cannot now; None for who never can, and cuts nothing.
        beside: folder in which new cuts are written down by who must not change the producer's.
    """

    def __init__(
        self,
        folder: Path | None,
        next_seq: Callable[[], int | None] | None = None,
        *,
        beside: Path | None = None,
    ) -> None:
        self._folder, self._next_seq = None if folder is None else folder / spool.SPLIT, next_seq
        self._beside = beside
        self._known: dict[tuple[int, str], list[Batch]] = {}

    def of(self, batch: Batch) -> list[Batch]:
        """The parts that a batch was cut into before; none where it was not."""
        key = (batch.seq, batch.digest)
        if key in self._known:
            return self._known[key]
        kept = (place / _name(batch) for place in (self._folder, self._beside) if place is not None)
        path = next((path for path in kept if path.exists()), None)
        return [] if path is None else list(spool.read_segment(path))

    @property
    def last_seq(self) -> int:
        """The highest number that a part has; -1 where nothing was cut."""
        places = [place for place in (self._folder, self._beside) if place is not None]
        paths = [path for place in places for path in place.glob("*.awb")]
        return max((part.seq for path in paths for part in spool.read_segment(path)), default=-1)

    def cut(self, batch: Batch) -> list[Batch]:
        """Cut a batch in two; none where that cannot be done.

        Errors: OSError where the cut cannot be written down.
        """
        halves = _halves(batch)
        following = self._next_seq() if self._next_seq is not None and halves else None
        if halves is None or following is None:
            return []
        parts = [_pack(batch, batch.seq, halves[0]), _pack(batch, following, halves[1])]
        place = self._beside or self._folder
        if place is not None and (self._beside is not None or place.parent.exists()):
            path = place / _name(batch)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            whole = path.with_suffix(".new")
            whole.write_bytes(b"".join(map(spool.frame, parts)))
            whole.replace(path)
        else:
            self._known[batch.seq, batch.digest] = parts
        return parts


def _name(batch: Batch) -> str:
    return f"{batch.kind}-{batch.seq:06d}-{batch.digest}.awb"


def _halves(batch: Batch) -> tuple[Any, Any] | None:
    if batch.kind == "events":
        events = batch.events()
        middle = len(events) // 2
        return (events[:middle], events[middle:]) if middle else None
    table = batch.table()
    middle = len(table["attempt"]) // 2
    first = {name: column[:middle] for name, column in table.items()}
    return (first, {name: column[middle:] for name, column in table.items()}) if middle else None


def _pack(whole: Batch, seq: int, content: Any) -> Batch:
    key: dict[str, Any] = {"producer": whole.producer, "seq": seq, "run": whole.run, "rank": whole.rank}
    if whole.kind == "events":
        return records.pack_events(content, **key)
    return records.pack_table(whole.kind, content, **key)
