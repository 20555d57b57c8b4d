"""What each program of the grid works on, and where the gradients are: two tables in the memory of the device.

Who works on what follows from the sizes: a `Table` is made and copied once, and kept while the sizes stay as they
are. Addresses change at every step where gradients are set to None, so they are compared at every call and copied if
they differ, in one copy from pinned memory. The copy is asynchronous: memory that it may still read from must not be
written to. Each slot of memory has an event, recorded on the stream by the thread that launches; where the oldest
slot's has not come yet, one more slot is made, and nobody waits. How many are in flight is bounded by the device's
launch queue, 1,024 kernels of which a call takes two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers: TypeAlias = npt.NDArray[np.int64]

PROGRAMS: Final = 4096  # aimed at: enough to fill any GPU several times over, few enough to add up quickly
SLOTS: Final = 4
TO_THE_END: Final = 1 << 62


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self) -> None:
        """Set it behind what has been launched on the current stream."""

    def query(self) -> bool:
        """Whether it has been passed. Never waits."""


class Passed:
    """The event of a device that does its work at once."""

    def record(self) -> None:
        """Nothing to mark."""

    def query(self) -> bool:
        """True."""
        return True


class Host(NamedTuple):
    """What a device needs of the host: memory for int64 that it can read without blocking, and events."""

    memory: Callable[[int], Tensor]
    event: Callable[[], Event]


def host_of(device: torch.device) -> Host:
    """Pinned memory and CUDA events for CUDA, plain memory for the CPU."""
    if device.type == "cuda":
        return Host(
            lambda n: torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event
        )
    return Host(lambda n: torch.empty(n, dtype=torch.int64, device="cpu"), Passed)


class Work(NamedTuple):
    """The work items of tensors of given sizes."""

    items: Numbers
    """(m, 3): tensor, its first tile, and the tile before which to stop."""
    firsts: Numbers
    """(n + 1,): the first item of each tensor; then m."""


def work_of(sizes: Numbers, tile: int, most_tiles: int) -> Work:
    """Cut tensors into items of equal length.

    Arguments:
        sizes: (n,) elements of each tensor.
        tile: elements of a tile.
        most_tiles: of an item. The last item of a tensor may have one more, where its first tile begins before it.
    """
    tiles = -(-sizes // tile)
    length = int(np.clip(-(-tiles.sum() // PROGRAMS), 1, most_tiles))
    count = -(-tiles // length)
    firsts = np.concatenate(([0], np.cumsum(count)))
    tensor = np.repeat(np.arange(len(sizes)), count)
    first = (np.arange(len(tensor)) - firsts[tensor]) * length
    stop = first + length
    stop[firsts[1:][count > 0] - 1] = TO_THE_END
    return Work(np.stack([tensor, first, stop], 1).astype(np.int64), firsts.astype(np.int64))


class _Slot:
    """The addresses of one call, on both sides."""

    def __init__(self, size: int, device: torch.device, host: Host) -> None:
        self._pinned = host.memory(size)
        self.addresses: Numbers = self._pinned.numpy()
        self.on_device = torch.empty(size, dtype=torch.int64, device=device)
        self.event = host.event()

    def fill(self, addresses: Numbers) -> None:
        self.addresses[:] = addresses
        self.on_device.copy_(self._pinned, non_blocking=True)


class Table:
    """The tables for gradients of given sizes, on one device and stream and for one thread.

    Arguments:
        sizes: (n,) elements of each tensor.
        rows: (n,) row of the result that belongs to each tensor.
        tile, most_tiles: as for `work_of`.
        device: where the tensors are.
        host: its `host_of`, or another for tests.

    Attributes `sizes`, `rows`, `firsts`, `items`: int64 on the device. Nothing here synchronises with it.
    """

    def __init__(
        self, sizes: Numbers, rows: Numbers, tile: int, most_tiles: int, device: torch.device, host: Host
    ) -> None:
        work = work_of(sizes, tile, most_tiles)
        self.tensors, self.programs = len(sizes), len(work.items)
        parts = [sizes, rows, work.firsts, work.items.reshape(-1)]
        self._pinned = host.memory(sum(map(len, parts)))  # never written to again: it needs no event
        self._pinned.numpy()[:] = np.concatenate(parts)
        on_device = torch.empty_like(self._pinned, device=device).copy_(self._pinned, non_blocking=True)
        self.sizes, self.rows, self.firsts, self.items = torch.split(on_device, [len(part) for part in parts])
        self._device, self._host = device, host
        self._slots: deque[_Slot] = deque()

    def place(self, addresses: Numbers) -> Tensor:
        """The addresses, (n,) int64, on the device; copied there unless a slot still holds just these."""
        slot = next((slot for slot in self._slots if np.array_equal(slot.addresses, addresses)), None)
        if slot is None:
            slot = self._free_slot()
            slot.fill(addresses)
        else:
            self._slots.remove(slot)
        self._slots.append(slot)
        return slot.on_device

    def launched(self) -> None:
        """What reads the addresses placed last has been launched, on the current stream."""
        self._slots[-1].event.record()

    def _free_slot(self) -> _Slot:
        """The slot that was used longest ago, if the device is done with it; otherwise one more."""
        if len(self._slots) >= SLOTS and self._slots[0].event.query():
            return self._slots.popleft()
        return _Slot(self.tensors, self._device, self._host)
