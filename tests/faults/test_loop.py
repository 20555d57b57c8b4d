import pytest
import torch
from loops import above_info, half, mlp, recorded, regression, train, worse_than_info
from torch import nn


def run(directory, body, steps=10, **scaler_arguments):
    """`body(step, model, optimizer, scaler)` after the backward pass, until torch refuses."""
    model = mlp()
    with recorded(directory) as make:
        scaler, optimizer = (
            make(model=model, **scaler_arguments),
            torch.optim.SGD(model.parameters(), lr=1e-3),
        )
        for step in range(steps):
            optimizer.zero_grad()
            with half():
                loss = regression(model, step)
            scaler.scale(loss).backward()
            body(step, model, optimizer, scaler)


def test_unscale_twice_is_refused_by_torch(tmp_path):
    def body(step, model, optimizer, scaler):
        scaler.unscale_(optimizer)
        if step == 4:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(RuntimeError, match="unscale_"):
        run(tmp_path, body)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("call_order", "error", 4)


def test_a_missing_update_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="step"):
        run(tmp_path, lambda step, model, optimizer, scaler: scaler.step(optimizer))
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, "update() is missing" in finding.headline) == ("call_order", True)


def test_update_in_every_micro_batch_mixes_scales(tmp_path):
    def body(step, model, optimizer, scaler):
        if step % 4 == 3:
            scaler.step(optimizer)
        elif step > 4:
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.update()
            return
        else:
            return
        scaler.update()

    run(tmp_path, body, steps=12)
    assert above_info(tmp_path) == [("call_order", "error")]


def test_a_step_past_the_scaler_is_named(tmp_path):
    def body(step, model, optimizer, scaler):
        optimizer.step()
        scaler.step(optimizer)
        scaler.update()

    run(tmp_path, body)
    assert above_info(tmp_path) == [("scaler_bypassed", "error")]


def test_the_right_order_is_silent(tmp_path):
    def body(step, model, optimizer, scaler):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    run(tmp_path, body)
    assert above_info(tmp_path) == []


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.bfloat16, ["useless_scaler"]), (torch.float16, [])])
def test_a_scaler_beside_bfloat16_is_useless(tmp_path, dtype, kinds):
    model = mlp()
    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model), lambda step: regression(model, step), dtype=dtype, steps=5)
    assert [kind for kind, _ in above_info(tmp_path)] == kinds
