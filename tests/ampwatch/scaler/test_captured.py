"""While a CUDA graph is captured nothing of ours runs, and the record says that it was. (CUDA says so here by a stub.)"""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ampwatch

from ..recorded import scaler as make
from .loops import Weighted, attempt, half, network, sgd


@pytest.fixture
def capturing(monkeypatch):
    """A context in which torch says that a stream is being captured."""

    @contextmanager
    def captured():
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_initialized", lambda: True)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield

    return captured


class Operations(TorchDispatchMode):
    """Lists what runs: a graph would hold it and run it again at every replay."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_graph_holds_torchs_operations_and_no_others(recorder, capturing):
    model = network(4, 8, 1)

    def captured(scaler, its):
        optimizer, loss = sgd(its), half(its, torch.ones(2, 4))
        scaler.scale(loss)  # makes the tensor of the scale, as torch asks for before a capture
        with capturing(), Operations() as operations:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return operations.seen

    plain = captured(torch.amp.GradScaler("cpu"), copy.deepcopy(model))
    assert captured(make(recorder, model=model), model) == plain
    assert "aten._amp_update_scale_.default" in plain


def test_the_record_says_once_that_it_was_captured_and_has_the_attempts_before_and_after(recorder, capturing):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    with capturing():
        for _ in range(3):
            attempt(scaler, model, optimizer)
    attempt(scaler, model, optimizer)
    assert (recorder.data("captured"), recorder.column("attempt")) == ([{}], [0, 1])
    assert recorder.events("call_fault", "fault") == []


def test_a_state_that_is_loaded_while_it_is_captured(recorder, capturing):
    scaler = make(recorder, init_scale=4.0)
    with capturing():
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
        assert scaler.scale(torch.ones(())).item() == 2.0


def test_without_a_scaler_the_steps_of_a_captured_optimizer_are_left_out(recorder, capturing):
    model = Weighted()
    optimizer = ampwatch.watch_optimizer(sgd(model), model=model, recorder=recorder)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2)).backward()
        optimizer.step()

    step()
    with capturing():
        step()
    step()
    assert recorder.column("attempt") == [0, 1]
