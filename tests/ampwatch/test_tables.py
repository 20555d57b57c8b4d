"""The host's side of the Triton kernel: who works on what, and memory that may not be written to yet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ampwatch.stats import fused, reference
from ampwatch.stats.dense import Dense
from ampwatch.stats.layout import WIDTH
from ampwatch.stats.tables import PROGRAMS, SLOTS, TO_THE_END, Host, Table, host_of, work_of

CPU = torch.device("cpu")


class Pending:
    """An event that the test lets come."""

    def __init__(self):
        self.records, self.passed = 0, False

    def record(self):
        self.records += 1

    def query(self):
        return self.passed


def pending():
    """A host whose events come when the test says so, and the events that it made."""
    events = []

    def event():
        events.append(Pending())
        return events[-1]

    return Host(host_of(CPU).memory, event), events


def array(*numbers):
    return np.array(numbers, np.int64)


def table(host, sizes=(5, 7)):
    return Table(array(*sizes), np.arange(len(sizes)), 4096, 120, CPU, host)


def test_work_by_hand():
    work = work_of(array(4096 * 2 + 1, 0, 10), 4096, 120)
    assert work.firsts.tolist() == [0, 3, 3, 4]
    assert work.items.tolist() == [[0, 0, 1], [0, 1, 2], [0, 2, TO_THE_END], [2, 0, TO_THE_END]]


@given(st.lists(st.integers(0, 2**33), max_size=20), st.sampled_from([2048, 4096]))
def test_every_tile_is_worked_on_once(sizes, tile):
    work = work_of(array(*sizes), tile, 120)
    for tensor, size in enumerate(sizes):
        items = work.items[work.firsts[tensor] : work.firsts[tensor + 1]]
        assert (items[:, 0] == tensor).all()
        assert items[1:, 1].tolist() == items[:-1, 2].tolist()
        assert items[:, 1].tolist()[:1] == ([0] if size else [])
        assert (np.minimum(items[:, 2], -(-size // tile)) - items[:, 1]).max(initial=0) <= 120


def test_thousands_of_tensors_and_a_large_one():
    work = work_of(array(*[37] * 5000), 4096, 120)
    assert len(work.items) == 5000
    assert len(work_of(array(1_300_000_000), 4096, 120).items) <= PROGRAMS


def test_the_table_holds_sizes_rows_and_items():
    made = Table(array(5, 7), array(3, 1), 4096, 120, CPU, host_of(CPU))
    assert (made.tensors, made.programs) == (2, 2)
    assert [made.sizes.tolist(), made.rows.tolist(), made.firsts.tolist()] == [[5, 7], [3, 1], [0, 1, 2]]
    assert made.items.tolist() == [0, 0, TO_THE_END, 1, 0, TO_THE_END]


def test_addresses_are_copied_only_where_they_differ():
    host, events = pending()
    made = table(host)
    first = made.place(array(1, 2))
    made.launched()
    assert made.place(array(1, 2)) is first
    made.launched()
    assert [event.records for event in events] == [2]
    assert made.place(array(1, 3)).tolist() == [1, 3]
    assert first.tolist() == [1, 2]


def test_memory_in_flight_is_not_written_to():
    host, events = pending()
    made = table(host)
    placed = []
    for i in range(2 * SLOTS):
        placed.append(made.place(array(i, i)))
        made.launched()
    assert [one.tolist() for one in placed] == [[i, i] for i in range(2 * SLOTS)]
    assert len(events) == 2 * SLOTS


def test_memory_is_used_again_when_its_event_has_come():
    host, events = pending()
    made = table(host)
    for i in range(100):
        made.place(array(i, i))
        made.launched()
        for event in events:
            event.passed = True
    assert len(events) == SLOTS


def test_tables_are_kept_for_sizes_seen_before_and_dropped_beyond_a_bound(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(fused, "_kept", fused._Kept())
    grads, alike = (Dense.of([torch.empty(3), torch.empty(4)]) for _ in range(2))
    first = fused._table(grads, range(2), torch.float32, CPU)
    assert fused._table(alike, range(2), torch.float32, CPU) is first
    assert fused._table(grads, (1, 0), torch.float32, CPU) is not first
    for n in range(100):
        fused._table(Dense.of([torch.empty(n)]), (0,), torch.float32, CPU)
    assert len(fused._kept.tables) == fused.KEPT_TABLES


def test_without_a_gpu_torch_and_the_reference_do_the_work():
    pytest.importorskip("triton")
    grads = [torch.tensor([3.0, float("inf")]), torch.tensor([], dtype=torch.float32)]
    before, found_inf = reference.statistics_of(grads), torch.zeros(1)
    assert not fused.handles(grads[0])
    assert torch.equal(fused.unscale_with_statistics_(grads, found_inf, torch.tensor([0.5])), before)
    assert (grads[0].tolist(), found_inf.item()) == ([1.5, float("inf")], 1.0)
    assert fused.statistics_of([]).shape == (0, WIDTH)


def test_fake_gradients_are_left_to_the_reference():
    pytest.importorskip("triton")
    with FakeTensorMode():
        grads = [torch.empty(300, device="cuda"), torch.empty(7, device="cuda")]
        rows = fused.unscale_with_statistics_(
            grads, torch.empty(1, device="cuda"), torch.empty(1, device="cuda")
        )
    assert (rows.shape, rows.device.type) == ((2, WIDTH), "cuda")


def test_available_means_a_gpu():
    pytest.importorskip("triton")
    assert fused.available() == torch.cuda.is_available()


def test_the_default_device_has_no_say_in_the_hosts_memory():
    with torch.device("meta"):
        assert host_of(torch.device("cpu")).memory(2).is_cpu
