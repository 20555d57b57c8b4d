"""state_dict, pickle and deepcopy, between and inside iterations: what torch loads and copies, and what it refuses."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn

import ampwatch

from .twin import OURS, assert_lockstep, attempt, batches, given, loss_of, make, small_model

STATE = {
    "scale": 3.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 5,
}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "torch.save": saved,
}


def used_scaler(kind):
    scaler, parameter = make(kind), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        given(scaler, [parameter], [torch.ones(3)])
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kinds", [*itertools.product(["torch", *OURS], repeat=2)])
def test_state_dicts_load_both_ways(kinds, used):
    source, target = (make(kind) for kind in kinds)
    source.load_state_dict(STATE)
    if used:
        target.scale(torch.ones(()))
    target.load_state_dict(source.state_dict())
    assert target.state_dict() == STATE
    assert target.scale(torch.ones(())).item() == 3.0


@pytest.mark.parametrize("after", ["scale", "unscale_", "step", "update"])
def test_a_state_that_is_loaded_inside_an_iteration(after):
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.Adam(model.parameters()), make(model, growth_interval=2)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            for call in ("scale", "unscale_", "step", "update"):
                if call in ("unscale_", "step"):
                    getattr(scaler, call)(optimizer)
                if call == "update":
                    scaler.update()
                if call == after and step == 1:
                    scaler.load_state_dict(STATE)
            yield scaler.state_dict(), [p.tolist() for p in model.parameters()]

    assert_lockstep(loop)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("after", ["scale", "unscale_", "step", "update"])
def test_training_goes_on_with_a_copy(after, copier, monkeypatch):
    """Inside an iteration too, where torch refuses to pickle what `copy` still takes along."""
    monkeypatch.setenv("AMPWATCH_DISABLED", "1")  # a pickled copy asks the environment where to record

    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model, growth_interval=2)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            for call in ("scale", "unscale_", "step"):
                if call != "scale":
                    getattr(scaler, call)(optimizer)
                if call == after and step == 2:
                    scaler = COPIERS[copier](scaler)
            scaler.update()
            if after == "update" and step == 2:
                scaler = COPIERS[copier](scaler)
            yield scaler.state_dict(), [p.tolist() for p in model.parameters()]

    assert_lockstep(loop)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("kind", OURS)
def test_copies_have_torchs_state(kind, copier, monkeypatch):
    monkeypatch.setenv("AMPWATCH_DISABLED", "1")
    ours, torchs = (COPIERS[copier](used_scaler(each)) for each in (kind, "torch"))
    assert ours.state_dict() == torchs.state_dict()
    assert ours.scale(torch.ones(())).item() == torchs.scale(torch.ones(())).item()


@pytest.mark.parametrize("kind", OURS)
def test_a_copy_shares_nothing_with_its_original(kind):
    original = used_scaler(kind)
    watched = vars(original)["_ampwatch"]
    duplicate = copy.deepcopy(original)
    assert watched not in vars(duplicate).values()
    duplicate.scale(torch.ones(()))
    assert vars(duplicate).get("_ampwatch") is not watched


def test_a_copy_of_a_scaler_watched_in_place_is_of_its_first_class():
    assert type(copy.deepcopy(used_scaler("in place"))) is torch.amp.GradScaler
    assert type(copy.deepcopy(used_scaler("ours"))) is ampwatch.GradScaler


def test_a_scaler_watched_in_place_is_pickled_as_torchs():
    """It loads where there is no ampwatch."""
    assert b"ampwatch" not in pickle.dumps(used_scaler("in place"))
    assert vars(copy.copy(used_scaler("in place"))).keys() == vars(used_scaler("torch")).keys()


@pytest.mark.parametrize("state", [{}, {"scale": 1.0}, {"scale": "a", **STATE}, {**STATE, "more": 1}])
@pytest.mark.parametrize("enabled", [True, False])
def test_states_that_are_not_whole(state, enabled):
    def loop(make):
        scaler = make(enabled=enabled)
        yield scaler.load_state_dict(state)
        yield scaler.state_dict()
        parameter = nn.Parameter(torch.ones(2))
        given(scaler, [parameter], [torch.ones(2)])
        yield attempt(scaler, [parameter], torch.optim.SGD([parameter], lr=0.1))

    assert_lockstep(loop)
