"""Numbers on their way from the device to plain memory, without a synchronisation.

The training thread sends one vector of float64 at a time: one copy into pinned memory, then a second one of the
vector's sequence number into a cell of its own, both on the training stream, so that the number cannot arrive
before the data. Whoever polls the cell reads plain memory and calls nothing of CUDA. On CPU the same path runs
with plain memory, and every vector has arrived when `send` returns.

Slots are made ahead by `reserve`, or as they are needed, and used again: on a GPU a slot is pinned memory, which the
device may have to stand still for. How many are in flight is bounded by the device's launch queue
(1,024 kernels, of which an attempt takes 15 and more), far below `MOST_SLOTS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .stats.pages import empty

Label = TypeVar("Label")
Numbers: TypeAlias = npt.NDArray[np.float64]
Memory: TypeAlias = Callable[[int], tuple[Tensor, Numbers]]
"""Makes a vector of float64 in host memory that the device can write without blocking: as torch and as numpy see it."""

MOST_SLOTS: Final = 128
_OF_NUMPY: Final = frozenset(  # what numpy has too
    (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
)


class _Slot:
    """Host memory for one vector, and the cell that its sequence number arrives in."""

    def __init__(self, size: int, memory: Memory) -> None:
        with torch.inference_mode(False):  # else what is made in it cannot be written to outside of it
            self.data, self._data = memory(size)
            self.cell, self._cell = memory(1)
        self._cell[0] = 0.0
        self.size = 0
        self.number = 0
        self.label: Any = None

    @property
    def arrived(self) -> bool:
        return bool(self._cell[0] == self.number)

    @property
    def numbers(self) -> Numbers:
        return self._data[: self.size]

    def fill(self, pieces: Sequence[Tensor]) -> None:
        """Write the data and their number, by numpy: an operation of torch takes several times as long."""
        stop = 0
        for piece in pieces:
            start, stop = stop, stop + piece.numel()
            self._data[start:stop].reshape(piece.shape)[...] = _as_numpy(piece)
        self._cell[0] = self.number


class Ring(Generic[Label]):
    """Vectors in flight from one device, in the order in which they were sent.

    `send` belongs to the training thread. `receive` may be called by any thread, but by one at a time.

    Arguments:
        device: where the numbers are gathered before they are copied.
        memory: makes host memory; by default pinned for CUDA, plain for CPU.
    """

    def __init__(self, device: torch.device, *, memory: Memory | None = None) -> None:
        self._device = device
        self._memory = memory or _host_memory(device)
        self._sent = self._looked_at = 0  # numbers of the newest
        self._free: list[_Slot] = []
        self._in_flight: deque[_Slot] = deque()

    def __len__(self) -> int:
        """Vectors that were sent and not received yet."""
        return len(self._in_flight)

    @property
    def bytes_in_flight(self) -> int:
        """Of the vectors that were sent and not received yet."""
        return sum(8 * slot.size for slot in list(self._in_flight))

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make slots ahead for vectors of these sizes, where that is pinned memory. Training thread only."""
        if self._device.type == "cuda":
            self._free += [_Slot(size, self._memory) for size in sizes]

    def send(self, pieces: Sequence[Tensor], label: Label) -> bool:
        """Send tensors of any real dtype and shape as one vector, in order. Never blocks, never synchronises.

        Arguments:
            pieces: need no gradient.
        Answers False, and sends nothing, where `MOST_SLOTS` are in flight.
        """
        if len(self._in_flight) >= MOST_SLOTS:
            return False
        self._sent += 1
        slot = self._slot(sum(map(Tensor.numel, pieces)))
        slot.label, slot.number = label, self._sent
        if self._device.type == "cpu":
            slot.fill(pieces)
        else:
            self._copy(pieces, slot)
        self._in_flight.append(slot)
        return True

    def _copy(self, pieces: Sequence[Tensor], slot: _Slot) -> None:
        """Let the data follow on the stream, and the sequence number behind it."""
        parts = [p.reshape(-1).to(self._device, torch.float64, non_blocking=True) for p in pieces]
        if slot.size:
            slot.data.narrow(0, 0, slot.size).copy_(torch.cat(parts), non_blocking=True)
        number = torch.full((1,), float(slot.number), dtype=torch.float64, device=self._device)
        slot.cell.copy_(number, non_blocking=True)

    def arrivals(self) -> Iterator[tuple[Label, Numbers]]:
        """What has arrived since this was last asked, as `receive`, and is left where it is.

        For who may receive. Reads plain memory only.
        """
        for slot in self._in_flight:
            if not slot.arrived:
                break
            if slot.number > self._looked_at:
                self._looked_at = slot.number
                yield slot.label, slot.numbers

    def receive(self) -> Iterator[tuple[Label, Numbers]]:
        """What has arrived, oldest first: label and numbers, a view that ends with the loop's next turn.

        Reads plain memory only.
        """
        while self._in_flight and self._in_flight[0].arrived:
            slot = self._in_flight.popleft()
            try:
                yield slot.label, slot.numbers
            finally:
                slot.label = None
                self._free.append(slot)

    def _slot(self, size: int) -> _Slot:
        """The smallest free slot that is large enough, or a new one, for which the smallest goes if there are many.

        The receiver only ever adds to the free ones.
        """
        fitting = [slot for slot in self._free if slot.data.numel() >= size]
        if fitting:
            slot = min(fitting, key=_capacity)
            self._free.remove(slot)
        else:
            if len(self._free) >= MOST_SLOTS:
                self._free.remove(min(self._free, key=_capacity))
            slot = _Slot(size, self._memory)
        slot.size = size
        return slot


def _as_numpy(piece: Tensor) -> npt.NDArray[Any]:
    """A tensor as numpy sees it; converted, where that has no such dtype or it lies elsewhere."""
    is_seen = piece.is_cpu and piece.dtype in _OF_NUMPY
    numbers: npt.NDArray[Any] = (piece if is_seen else piece.to("cpu", torch.float64)).numpy()
    return numbers


def _capacity(slot: _Slot) -> int:
    return slot.data.numel()


def _host_memory(device: torch.device) -> Memory:
    def memory(size: int) -> tuple[Tensor, Numbers]:
        if device.type == "cuda":
            vector = torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=True)
            return vector, vector.numpy()
        numbers = empty(size)
        return torch.from_numpy(numbers), numbers

    return memory
