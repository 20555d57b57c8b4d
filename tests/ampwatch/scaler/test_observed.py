"""What the observers of a scaler see, and when they look."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch.probes import CHECK_EVERY, SEARCH_FOR
from ampwatch.records import is_missing

from ..recorded import MemoryRecorder
from ..recorded import scaler as make
from .loops import Weighted, attempt, half, network, sgd


def overflowing():
    """Finite weights whose second layer leaves the range of float16."""
    model = network(4, 4, 4, 4)
    for layer, gain in ((0, 200.0), (2, 400.0), (4, 1.0)):
        nn.init.constant_(model[layer].weight, gain)
        nn.init.zeros_(model[layer].bias)
    return model


def test_a_forward_overflow_is_traced_to_its_module(recorder):
    model = overflowing()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    (search,) = recorder.events("forward_search")
    assert (search.attempt, search.data["origin"]["module"]) == (2, "2")
    assert [e.attempt for e in recorder.events("finite_check")] == [0, 0, 1, 3]


def test_an_overflow_in_a_later_micro_batch_is_traced_too(recorder):
    model = overflowing()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(3):
        optimizer.zero_grad()
        for x in (torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 4)):
            scaler.scale(half(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            half(model, torch.zeros(2, 4))
    (search,) = recorder.events("forward_search")
    assert (search.attempt, search.data["origin"]["module"]) == (2, "2")


def test_the_search_is_of_an_attempt_of_the_stream_that_breaks(recorder):
    model = nn.ModuleList([overflowing(), network(4, 4, 1)])
    optimizers, scaler = [sgd(part) for part in model], make(recorder, model=model)
    for i in (0, 1, 0, 1, 1, 0):
        optimizers[i].zero_grad()
        scaler.scale(half(model[i], torch.ones(2, 4))).backward()
        scaler.step(optimizers[i])
        scaler.update()
    (search,) = recorder.events("forward_search")
    assert (search.attempt, search.stream, search.data["origin"]["module"]) == (5, 0, "0.2")


def test_a_search_does_not_wait_for_ever(recorder):
    model = nn.ModuleList([overflowing(), Weighted()])
    optimizers, scaler = [sgd(part) for part in model], make(recorder, model=model)
    for _ in range(2):
        scaler.scale(half(model[0], torch.ones(2, 4))).backward()
        scaler.step(optimizers[0])
        scaler.update()
    assert model[1]._forward_hooks
    for _ in range(65):
        attempt(scaler, model[1], optimizers[1], x=(0.0, 0.0))
    assert (len(model[1]._forward_hooks), recorder.data("forward_search")) == (0, [])


def test_buffers_that_the_first_pass_poisons_are_told_at_once(recorder):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[0].weight, 1.0)
    optimizer, scaler = sgd(model), make(recorder, model=model)
    scaler.scale(half(model, torch.full((2, 4), 6e4))).backward()
    scaler.step(optimizer)
    scaler.update()
    first = recorder.events("finite_check")[0]
    poisoned = {"checked": 2, "nonfinite": ["1.running_mean", "1.running_var"], "count": 2}
    assert (first.attempt, first.data["buffers"]) == (0, poisoned)


def test_parameters_and_buffers_are_looked_at_again_every_so_many_attempts(recorder):
    """In a run without a skip, where a buffer is poisoned after the first look."""
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2).eval())
    model.register_buffer("seen", torch.zeros(2))
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for step in range(CHECK_EVERY + 1):
        if step == 3:
            model.seen.fill_(math.nan)
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    last = recorder.events("finite_check")[-1]
    assert (last.attempt, last.data["buffers"]["nonfinite"]) == (CHECK_EVERY - 1, ["seen"])


def test_the_first_pass_tells_autocast_order_and_origin(recorder):
    model = network(16, 64, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model, init_scale=256.0)
    scaler.scale(half(model, torch.randn(8, 16))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert recorder.data("autocast") == [
        {"dtype": "float16", "device": "cpu", "by_hand": False, "elsewhere": None}
    ]
    assert sorted(recorder.data("backward_order")[0]["tensors"]) == [0, 1, 2, 3]
    assert recorder.data("origin")[0]["origins"]["0"] == "float16"
    assert not is_missing(recorder.column("headroom_log2"))


def test_without_a_model_the_origin_is_seen_one_attempt_later(recorder):
    model = network(16, 64, 1)
    optimizer, scaler = sgd(model), make(recorder, init_scale=256.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.randn(8, 16))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [(e.type, e.attempt) for e in recorder.events("origin", "backward_order")] == [
        ("origin", 1),
        ("backward_order", 1),
    ]


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize(
    ("factor", "looks"),
    [
        (
            [math.nan] * 3 + [1.0] * 7,
            [0, 1, 2, 4],
        ),  # 4: a power of two, and the one after the first clean attempt
        ([math.nan] * 5 + [1.0] * 5, [0, 1, 2, 4, 6]),
        ([2.0**-40] * 7 + [1.0] * 3, [0, 1, 2, 4, 8]),  # all underflow, clean
        ([1.0] * 10, [0]),
    ],
)
def test_the_origin_is_looked_at_until_some_is_known(recorder, factor, looks, with_model):
    model = network(16, 64, 1)
    optimizer = sgd(model)
    scaler = make(recorder, model=model if with_model else None, init_scale=256.0)
    for each in factor:
        optimizer.zero_grad()
        scaler.scale(half(model, torch.randn(8, 16)) * each).backward()
        scaler.step(optimizer)
        scaler.update()
    found = [e.attempt for e in recorder.events("origin")]
    assert found == (looks if with_model else looks[1:] or [1])
    assert recorder.data("origin")[-1]["origins"]["0"] == "float16"


def test_a_disabled_scaler_says_so_and_nothing_more(recorder):
    model = network(4, 8, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model, enabled=False)
    for _ in range(3):
        scaler.scale(half(model, torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [e.type for e in recorder.events()] == [
        "loss_dtype",
        "scaler",
        "autocast",
        "backward_order",
        "origin",
    ]
    assert (recorder.data("scaler")[0]["enabled"], recorder.column("attempt")) == (False, [])


def test_a_model_whose_parameters_get_their_shape_in_the_first_pass(recorder):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(2))
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.ones(4, 16))).backward()
        scaler.step(optimizer)
        scaler.update()
    (named,) = recorder.data("tensors")
    names = {tensor["id"]: tensor["name"] for tensor in named["tensors"]}
    (order,), (origin,) = recorder.data("backward_order"), recorder.data("origin")
    assert [names[tensor] for tensor in order["tensors"]] == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert sorted(map(int, origin["origins"])) == sorted(names)


def announced(recorder):
    """Each announcement: the first attempt it is true of, what for, whether hooks are on, and why.

    Without those of later looks at the origin of gradients, which come while nothing is known of it.
    """
    found = [
        (e.attempt, e.data["observers"], e.data["hooks"] > 0, e.data["why"])
        for e in recorder.events("observers")
    ]
    return [each for each in found if each[1] != ["origin"]]


FIRST = ["autocast", "replicas", "backward_order", "origin"]
MET = (0, ["accumulations"], True, "optimizer_met")
SEARCH = ["forward_search", "operations"]


def test_hooks_are_announced_as_they_come_and_go(recorder):
    model = overflowing()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(4):
        scaler.scale(half(model, torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert announced(recorder) == [
        (0, FIRST, True, "first_pass"),
        MET,
        (1, FIRST, False, "done"),
        (2, SEARCH, True, "loss_not_finite"),
        (3, SEARCH, False, "done"),
    ]
    (first, *_) = recorder.data("observers")
    leaves = [module for module in model.modules() if not [*module.children()]]
    assert first["hooks"] == 2 * len(leaves) + 2 * len([*model.parameters()])


def test_a_search_that_is_given_up_says_so(recorder):
    """The stream whose loss broke does not come again."""
    model = nn.ModuleList([overflowing(), network(4, 4, 1)])
    optimizers, scaler = [sgd(part) for part in model], make(recorder, model=model)
    for i in (0, 0, *[1] * (SEARCH_FOR + 1)):
        scaler.scale(half(model[i], torch.ones(2, 4))).backward()
        scaler.step(optimizers[i])
        scaler.update()
    its = [each for each in announced(recorder) if each[1] == SEARCH]
    assert its == [(2, SEARCH, True, "loss_not_finite"), (SEARCH_FOR + 3, SEARCH, False, "given_up")]


def test_hooks_of_an_optimizer_without_a_scaler_are_announced(recorder):
    model = network(4, 8, 1)
    optimizer = ampwatch.watch_optimizer(sgd(model), model=model, recorder=recorder)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    assert announced(recorder) == [
        (0, FIRST, True, "first_pass"),
        (0, ["forward"], True, "model_given"),
        MET,
        (1, FIRST, False, "done"),
    ]


def hooks_on(model):
    dicts = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")
    owners = [*model.modules(), *model.parameters()]
    return [hook for o in owners for name in dicts for hook in (getattr(o, name, None) or {}).values()]


@pytest.mark.parametrize("observers", [True, False])
def test_observers_can_be_switched_off(observers):
    """A forward overflow, which is searched for otherwise; what needs no hook is recorded all the same."""
    recorder, model, hooks = MemoryRecorder(observers=observers), overflowing(), []
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(4):
        hooks += hooks_on(model)
        loss = scaler.scale(half(model, torch.ones(2, 4)))
        hooks += (loss._backward_hooks or {}).values()
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    seen = {"autocast", "backward_order", "origin", "replicas", "forward_search"} & {
        e.type for e in recorder.events()
    }
    assert (bool(hooks), bool(seen)) == (observers, observers)
    assert (recorder.column("attempt"), len(recorder.data("finite_check")) > 0) == ([0, 1, 2, 3], True)


@pytest.mark.parametrize("observers", [True, False])
def test_observers_of_an_optimizer_without_a_scaler_can_be_switched_off(observers):
    gc.collect()  # scalers of other tests, which look at an optimizer that none of them steps
    recorder, model, hooks = MemoryRecorder(observers=observers), network(4, 8, 1), []
    optimizer = ampwatch.watch_optimizer(sgd(model), model=model, recorder=recorder)
    for _ in range(3):
        hooks += hooks_on(model)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (bool(hooks), recorder.column("attempt")) == (observers, [0, 1, 2])
