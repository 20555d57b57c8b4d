"""Run-length coding of events: a scaler at its floor says the same at every attempt."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .records import Event


def coded(events: Iterable[Event]) -> list[Event]:
    """The events, those alike at consecutive attempts as one that says how often, at the place of the first.

    Alike are type, step, stream and data to the last bit. Nothing is lost but the times of the repetitions, which
    the rows of these attempts hold.
    """
    kept: list[Event] = []
    last: dict[tuple[str, int, int, bytes], int] = {}
    for event in events:
        key = (event.type, event.step, event.stream, msgspec.msgpack.encode(event.data))
        place = last.get(key)
        if place is not None and event.attempt >= 0 and event.attempt == _end(kept[place]):
            kept[place] = msgspec.structs.replace(kept[place], repeat=kept[place].repeat + event.repeat)
        else:
            last[key] = len(kept)
            kept.append(event)
    return kept


def _end(event: Event) -> int:
    return event.attempt + event.repeat
