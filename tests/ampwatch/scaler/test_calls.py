"""The order of calls as it is recorded, and what is wrong with it."""

from __future__ import annotations

import pytest
import torch

from ..recorded import scaler as make
from .loops import Weighted, attempt, network, sgd


def test_a_step_outside_the_scaler_stands_in_the_order_of_calls(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    optimizer.step()
    attempt(scaler, model, optimizer)
    assert recorder.data("calls")[1]["order"] == ["outside:0", "scale", "step:0", "update"]


def test_a_scaler_made_anew_replaces_the_one_before(recorder):
    model = Weighted()
    optimizer = sgd(model)
    for _ in range(2):
        attempt(make(recorder), model, optimizer)
    assert [(s["scaler"], s["replaces"]) for s in recorder.data("scaler")] == [(0, None), (1, 0)]
    assert len(recorder.data("optimizers")) == 1


def test_optimizers_of_another_scaler_are_not_replaced(recorder):
    for _ in range(2):
        model = Weighted()
        attempt(make(recorder), model, sgd(model))
    assert [s["replaces"] for s in recorder.data("scaler")] == [None, None]


def test_calls_are_told_once_and_when_they_change(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    attempt(scaler, model, optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert [(e.attempt, e.data["order"]) for e in recorder.events("calls")] == [
        (0, ["scale", "step:0", "update"]),
        (2, ["scale", "unscale_:0", "step:0", "update"]),
    ]


def test_a_refused_call_is_told_and_torchs_exception_passes(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="has already been called"):
        scaler.unscale_(optimizer)
    (fault,) = recorder.events("call_fault")
    assert (fault.attempt, fault.data) == (
        1,
        {
            "fault": "unscale_twice",
            "optimizer": 0,
            "order": ["scale", "unscale_:0", "unscale_:0"],
            "raised": True,
        },
    )


def faults_of(recorder):
    return [(f["fault"], f["optimizer"], f["raised"]) for f in recorder.data("call_fault")]


def test_a_step_outside_the_scaler_is_told(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    optimizer.step()
    assert faults_of(recorder) == [("step_outside_scaler", 0, False)]


def test_a_step_of_the_optimizer_in_a_wrapper_that_hands_everything_on_is_told(recorder):
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    wrapper = Wrapper(optimizer)
    attempt(scaler, model, wrapper)
    scaler.scale(model(torch.ones(2))).backward()
    optimizer.step()
    assert faults_of(recorder) == [("step_outside_scaler", 0, False)]


@pytest.mark.parametrize("after", ["scale", "unscale_", "step"])
def test_an_exception_of_the_user_ends_no_recording(recorder, after):
    """A loop that goes on with the next batch: what torch makes of the calls since, it makes of ours."""

    def run(scaler):
        model = Weighted()
        optimizer, said = sgd(model), []
        for i in range(4):
            try:
                scaler.scale(model(torch.ones(2))).backward()
                for call in ("scale", "unscale_", "step"):
                    if call != "scale":
                        getattr(scaler, call)(optimizer)
                    if i == 1 and call == after:
                        raise ValueError("the user's")
                scaler.update()
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
                optimizer.zero_grad()
        return said, model.w.tolist(), scaler.state_dict()

    assert run(make(recorder)) == run(torch.amp.GradScaler("cpu"))
    assert recorder.column("attempt") == list(range(3 if after == "scale" else 1))


def test_an_optimizer_that_is_never_scaled_may_step_as_it_likes(recorder):
    model, temperature = Weighted(), Weighted()
    optimizer, other, scaler = sgd(model), sgd(temperature), make(recorder)
    for _ in range(3):
        attempt(scaler, model, optimizer)
        temperature(torch.ones(2)).backward()
        other.step()
    assert faults_of(recorder) == []


def test_unscaling_inside_an_accumulation_is_told_in_the_first_iteration(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.unscale_(optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.step(optimizer)
    assert faults_of(recorder) == [("unscale_in_accumulation", 0, False)]


def test_the_gradient_penalty_recipe_is_healthy(recorder):
    model = network(3, 8, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        loss = model(x).sum()
        (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
        scaler.scale(loss + (grad / scaler.get_scale()).norm()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (faults_of(recorder), recorder.column("losses")) == ([], [2, 2, 2])
