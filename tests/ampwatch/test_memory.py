"""Memory of a training process stays flat, whatever it has recorded. benchmarks/memory.py goes on for longer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ampwatch
from ampwatch.recorder import Recorder
from ampwatch.stats.pages import PAGES_FROM, empty

WARM_UP, ATTEMPTS = 300, 700
MOST_MIB = 2.0


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_stays_flat(tmp_path):
    recorder = Recorder(ampwatch.Settings(dir=tmp_path, quiet=True, flush_s=0.1))
    scaler = ampwatch.GradScaler("cpu", recorder=recorder)
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(4)]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    for attempt in range(WARM_UP + ATTEMPTS):
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.full((8,), torch.inf if attempt % 100 == 99 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        if attempt == WARM_UP:
            before = resident_mib()
    assert resident_mib() - before < MOST_MIB
    recorder.finish()


@pytest.mark.parametrize("size", [0, 1, PAGES_FROM // 8 - 1, PAGES_FROM // 8, 1_000_003])
def test_memory_for_statistics_can_be_written_to_its_end(size):
    numbers = empty(size)
    numbers.fill(0.5)
    assert (numbers.dtype, numbers.shape, float(numbers.sum())) == (np.float64, (size,), size / 2)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_large_memory_is_given_back_at_once():
    before, numbers = resident_mib(), empty(4 << 20)
    numbers.fill(1.0)
    assert resident_mib() - before > 30
    del numbers
    assert resident_mib() - before < MOST_MIB


def test_memory_is_used_again_only_after_the_last_that_looks_at_it():
    size = PAGES_FROM // 8 + 5
    numbers = empty(size)
    numbers.fill(1.0)
    view = torch.from_numpy(numbers.reshape(-1, 1)[3:])
    del numbers
    for _ in range(10):
        empty(size).fill(2.0)
    assert bool((view == 1.0).all())
    address = view.data_ptr() - 3 * 8
    del view
    assert address in [pages.ctypes.data for pages in [empty(size) for _ in range(2)]]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_of_memory_of_many_sizes_little_is_kept():
    before = resident_mib()
    for size in range(100):
        empty(PAGES_FROM + size).fill(1.0)  # a MiB
    assert resident_mib() - before < 5 + MOST_MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_to_memory_of_its_own():
    numbers = empty(PAGES_FROM)
    numbers[0] = 1.0
    child = os.fork()
    if not child:
        numbers[0] = 2.0
        os._exit(0)
    os.waitpid(child, 0)
    assert float(numbers[0]) == 1.0
