"""The flight recorder: what is kept of the last attempts, within its share of memory; and real runs whose steps fail."""

from __future__ import annotations

import math

import pytest
import torch

from ampwatch.dispatch import PORTION
from ampwatch.flight import DEVICE_BYTES, HOST_BYTES, TENSOR_BYTES, FlightRecorder, depth_for
from ampwatch.stats.layout import WIDTH

from .recorded import MemoryRecorder
from .recorded import scaler as watched


def rows(tensors, device="cpu"):
    return torch.empty(tensors, WIDTH, dtype=torch.float64, device=device)


@pytest.mark.parametrize("tensors", [1, 74, 272, 1000, 5000, 100_000])
@pytest.mark.parametrize(("device", "bound"), [("meta", math.inf), ("cpu", HOST_BYTES)])
def test_memory_is_bounded(tensors, device, bound):
    made = [rows(tensors, device)]
    depth = depth_for(made)
    assert depth == 1 or depth * made[0].nbytes <= min(bound, DEVICE_BYTES + TENSOR_BYTES * tensors)
    assert depth == 64 or tensors > 272


def test_the_last_attempts_are_kept():
    recorder, made = FlightRecorder(), rows(2)
    for attempt in range(100):
        recorder.keep(attempt, [made])
    assert (len(recorder), recorder.rows_of(35), recorder.rows_of(36)) == (64, None, [made])


def test_attempts_with_no_gradient_are_kept_too():
    recorder = FlightRecorder()
    for attempt in range(100):
        recorder.keep(attempt, [])
    assert len(recorder) == 64


def train(attempts, *, broken):
    """A real loop in which the gradients of some attempts overflow."""
    recorder = MemoryRecorder(tensor_every=1000)
    model = torch.nn.Linear(4, 2)
    scaler = watched(recorder, init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for attempt in range(attempts):
        optimizer.zero_grad()
        inputs = torch.full((1, 4), 3e38 if attempt in broken else 1.0)
        scaler.scale((model(inputs) * (10.0 if attempt in broken else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return recorder


def test_a_skip_brings_the_attempts_before_and_after_it():
    recorder = train(180, broken={150})
    assert recorder.column("found_inf").index(True) == 150
    assert sorted(set(recorder.tensors("attempt"))) == [*range(64), *range(87, 155)]


def test_what_is_recorded_is_what_was_at_the_attempt():
    recorder = train(180, broken={150})
    attempts, counts = recorder.tensors("attempt"), recorder.tensors("n_inf")
    assert {attempt for attempt, n in zip(attempts, counts, strict=True) if n} == {150}


def test_the_statistics_of_many_tensors_travel_in_portions_and_arrive_whole():
    recorder = MemoryRecorder()
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2 * PORTION + 5)]
    scaler, optimizer = watched(recorder), torch.optim.SGD(parameters, lr=0.1)
    scaler.scale(torch.ones(()))
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.full((1,), float(i))
    scaler.step(optimizer)
    scaler.update()
    portions = [recorder.sources[0].harvest(final=True) for _ in range(3)]
    assert [len(portion.tensors["tensor"]) for portion in portions] == [PORTION, PORTION, 5]
    assert [portion.has_more for portion in portions] == [True, True, False]
    largest = [value for portion in portions for value in portion.tensors["max_abs"].tolist()]
    assert largest == [float(i) for i in range(len(parameters))]
