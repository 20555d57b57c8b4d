"""The ring: order, reuse, and that nothing is read before its sequence number has arrived."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from ampwatch.ring import MOST_SLOTS, Ring

CPU = torch.device("cpu")


def received(ring):
    return [(label, numbers.tolist()) for label, numbers in ring.receive()]


def test_pieces_of_any_dtype_and_shape_arrive_as_one_vector():
    ring = Ring(CPU)
    ring.send(
        [torch.tensor(3, dtype=torch.int32), torch.ones(2, 2, dtype=torch.float16), torch.tensor([2.5])], "a"
    )
    assert received(ring) == [("a", [3.0, 1.0, 1.0, 1.0, 1.0, 2.5])]


def test_what_numpy_has_no_dtype_for_arrives_too():
    ring = Ring(CPU)
    ring.send([torch.tensor([1.5, math.inf], dtype=torch.bfloat16), torch.tensor(True)], "a")
    assert received(ring) == [("a", [1.5, math.inf, 1.0])]


def test_what_has_arrived_is_shown_once_and_left_where_it_is():
    ring = Ring(CPU)
    shown = []
    for i in range(3):
        ring.send([torch.full((2,), float(i))], i)
        shown += [(label, numbers.tolist()) for label, numbers in ring.arrivals()]
    assert shown == received(ring) == [(i, [float(i)] * 2) for i in range(3)]


def test_vectors_arrive_in_the_order_in_which_they_were_sent():
    ring = Ring(CPU)
    for i in range(20):
        ring.send([torch.full((i,), float(i))], i)
    assert received(ring) == [(i, [float(i)] * i) for i in range(20)]
    assert received(ring) == []


def test_float64_and_the_non_finite_arrive_exactly():
    ring = Ring(CPU)
    ring.send([torch.tensor([math.inf, -math.inf, 0.1, 2.0**-1074], dtype=torch.float64)], None)
    assert received(ring) == [(None, [math.inf, -math.inf, 0.1, 2.0**-1074])]


def test_slots_are_used_again():
    sizes = []
    ring = Ring(CPU, memory=lambda size: sizes.append(size) or Late()(size))
    for i in range(100):
        ring.send([torch.ones(3)], i)
        received(ring)
    assert sizes == [3, 1]


def test_a_larger_vector_gets_a_larger_slot():
    ring = Ring(CPU)
    for size in (1, 5, 2):
        ring.send([torch.ones(size)], size)
        assert received(ring) == [(size, [1.0] * size)]


class Late:
    """Host memory whose one-element cells, the sequence numbers, can be held back."""

    def __init__(self):
        self.cells = []

    def __call__(self, size):
        tensor = torch.zeros(size, dtype=torch.float64)
        if size == 1:
            self.cells.append(tensor)
        return tensor, tensor.numpy()


def test_nothing_is_read_before_its_number_and_nothing_overtakes():
    late = Late()
    ring = Ring(CPU, memory=late)
    ring.send([torch.ones(2)], "first")
    ring.send([torch.ones(2)], "second")
    late.cells[0].zero_()  # as if the device had not come to it yet
    assert received(ring) == []
    late.cells[0].fill_(1.0)
    assert received(ring) == [("first", [1.0, 1.0]), ("second", [1.0, 1.0])]


def test_a_full_ring_refuses_and_never_blocks():
    ring = Ring(CPU)
    answers = [ring.send([torch.ones(2)], i) for i in range(MOST_SLOTS + 1)]
    assert answers == [True] * MOST_SLOTS + [False]
    assert len(ring) == MOST_SLOTS


def test_the_label_is_let_go():
    ring = Ring(CPU)
    ring.send([torch.ones(1)], "kept?")
    received(ring)
    assert [slot.label for slot in ring._free] == [None]


def test_a_receiver_that_fails_leaves_the_ring_usable():
    ring = Ring(CPU)
    ring.send([torch.ones(2)], 0)
    ring.send([torch.ones(2)], 1)
    with pytest.raises(ZeroDivisionError):
        [1 / label for label, _ in ring.receive()]
    assert received(ring) == [(1, [1.0, 1.0])]


def test_a_missing_real_keeps_its_bits():
    bits = 0x7FF8_0000_0000_07A2
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    ring = Ring(CPU)
    ring.send([torch.tensor([value, 1.0], dtype=torch.float64)], None)
    ((_, numbers),) = [(label, numbers.copy()) for label, numbers in ring.receive()]
    assert numbers.view("<u8")[0] == bits
