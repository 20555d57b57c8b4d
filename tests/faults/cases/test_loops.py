"""What people have reported, as real training loops: each with its fault, and without it.

Of a loop with its fault it is asserted what is told above info: kind, severity, the attempt it was first said at, and
the tensor or module where one is named. Without its fault it is silent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from loops import features, half, mlp, recorded, recorded_optimizer, regression, train, worse_than_info
from torch import Tensor, nn
from torch.nn import functional as F

import ampwatch
from ampwatch import spool

Body = Callable[[Path, bool], None]


class Said(NamedTuple):
    """What is told above info."""

    kind: str
    severity: str
    first: int
    where: str = ""


LOOPS: dict[str, tuple[Body, list[Said]]] = {}


def reported(*said: Said) -> Callable[[Body], Body]:
    """Keep a loop, and what must be told of it; nothing where nothing is wrong that the records could tell."""

    def keep(body: Body) -> Body:
        LOOPS[body.__name__] = (body, list(said))
        return body

    return keep


def steps(
    directory: Path, model: nn.Module, loss_at: Callable[[int], Tensor], count: int = 20, **scaler
) -> None:
    """Plain steps by gradient descent."""
    with recorded(directory) as make:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        train(model, make(model=model, **scaler), loss_at, steps=count, optimizer=optimizer)


TEXT = torch.tensor([[1, 2, 3], [2, 3, 4], [3, 4, 5], [1, 3, 5]])


def ctc(scores: Tensor, length: int) -> Tensor:
    lengths = torch.full((4,), length)
    return F.ctc_loss(scores.float().view(length, 4, 6), TEXT, lengths, torch.full((4,), 3))


@reported(Said("loss_in_fp16", "fatal", 9))
def speech_whose_probabilities_are_taken_in_float16(directory: Path, fault: bool) -> None:
    model = nn.Linear(8, 6)

    def loss_at(step: int) -> Tensor:
        scores = model(features(step, rows=48)) * (300.0 if step >= 9 else 1.0)
        return ctc(scores.softmax(-1).log() if fault else scores.float().log_softmax(-1), 12)

    steps(directory, model, loss_at, init_scale=2.0**8)


@reported(Said("bad_batch", "warning", 7))
def speech_with_a_text_longer_than_its_sound(directory: Path, fault: bool) -> None:
    model = nn.Linear(8, 6)

    def loss_at(step: int) -> Tensor:
        ampwatch.log(batch_id=step % 10)
        length = 2 if fault and step % 10 == 7 else 12
        return ctc(model(features(step, rows=4 * length)).float().log_softmax(-1), length)

    steps(directory, model, loss_at, 30, init_scale=2.0**8)


@reported(Said("loss_in_fp16", "fatal", 9))
def a_cost_summed_over_a_hundred_thousand_points(directory: Path, fault: bool) -> None:
    model, points = nn.Linear(8, 2), torch.randn(110_000, 8)

    def loss_at(step: int) -> Tensor:
        costs = model(points).sigmoid() + (1.0 if step >= 9 else 0.0)
        total = torch.ones(1, len(points)) @ costs if fault else costs.float().sum(0)
        return total.float().mean() / len(points)

    steps(directory, model, loss_at, 16, init_scale=2.0**8)


@reported(Said("bad_batch", "warning", 3))
def vectors_of_zeros_that_are_normalised_in_float16(directory: Path, fault: bool) -> None:
    """The eps of `normalize`, 1e-12, is 0 in float16."""
    model = mlp(out=4)

    def loss_at(step: int) -> Tensor:
        targets = features(step)[:, :4] * (0.0 if step % 7 == 3 else 1.0)
        towards = F.normalize(targets.half() if fault else targets, dim=-1)
        return (1 - (F.normalize(model(features(step)).float(), dim=-1) * towards).sum(-1)).float().mean()

    steps(directory, model, loss_at, 30, init_scale=2.0**8)


def in_float16(directory: Path, model: nn.Module, loss_at: Callable[[int], Tensor], eps: float) -> None:
    """Adam over float16 parameters."""
    with recorded_optimizer(directory) as watched:
        optimizer = watched(torch.optim.Adam(model.parameters(), 1e-3, eps=eps), model=model)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_at(step)
            loss.backward()
            ampwatch.log(loss=loss)
            optimizer.step()


@reported(Said("epsilon_underflow", "fatal", 1))
def a_model_in_float16_and_the_default_eps(directory: Path, fault: bool) -> None:
    model = mlp().half()
    in_float16(
        directory,
        model,
        lambda step: (model(features(step).half()).float() - 1).square().mean(),
        1e-8 if fault else 1e-4,
    )


@reported(Said("epsilon_underflow", "fatal", 1))
def words_that_are_not_used_in_float16(directory: Path, fault: bool) -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 1)).half()
    in_float16(
        directory,
        model,
        lambda step: (model(torch.randint(0, 10, (16, 4))).float() - 1).square().mean(),
        1e-8 if fault else 1e-4,
    )


def by_hand(
    directory: Path,
    body: Callable[[int, nn.Module, torch.optim.Optimizer, torch.amp.GradScaler], None],
    **scaler,
) -> None:
    """`body(step, model, optimizer, scaler)` for a few steps, or until torch refuses."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with recorded(directory) as make, contextlib.suppress(AssertionError, RuntimeError):
        made = make(model=model, **{"init_scale": 2.0**8, **scaler})
        for step in range(12):
            optimizer.zero_grad()
            body(step, model, optimizer, made)


def loss_of(model: nn.Module, step: int) -> Tensor:
    with half():
        return regression(model, step)


@reported(Said("call_order", "error", 0))
def gradients_unscaled_before_any_loss_was_scaled(directory: Path, fault: bool) -> None:
    """As a library did on resuming."""

    def body(step, model, optimizer, scaler):
        loss = loss_of(model, step)
        (loss if fault else scaler.scale(loss)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    by_hand(directory, body)


@reported(Said("call_order", "error", 0))
def a_step_before_any_loss_was_scaled(directory: Path, fault: bool) -> None:
    def body(step, model, optimizer, scaler):
        loss = loss_of(model, step)
        (loss if fault else scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()

    by_hand(directory, body)


@reported(Said("call_order", "error", 0))
def a_closure_by_keyword(directory: Path, fault: bool) -> None:
    def body(step, model, optimizer, scaler):
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer, **({"closure": loss.detach} if fault else {}))
        scaler.update()

    by_hand(directory, body)


@reported(Said("call_order", "error", 8))
def a_step_that_the_loop_leaves_out_and_the_update_with_it(directory: Path, fault: bool) -> None:
    """Where the norm is too large at step 8."""

    def body(step, model, optimizer, scaler):
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        if step != 8:
            scaler.step(optimizer)
        if step != 8 or not fault:
            scaler.update()

    by_hand(directory, body)


@reported(Said("scaler_bypassed", "error", 0))
def two_networks_whose_optimizers_are_stepped_once_more(directory: Path, fault: bool) -> None:
    model = nn.ModuleList([mlp(), mlp()])
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in model]
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**8)
        for step in range(12):
            for each, optimizer in zip(model, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(loss_of(each, step)).backward()
                scaler.step(optimizer)
                if fault:
                    optimizer.step()
            scaler.update()


@reported(Said("scaler_bypassed", "error", 1))
def a_second_network_that_steps_whatever_the_scaler_says(directory: Path, fault: bool) -> None:
    model = nn.ModuleList([mlp(), mlp()])
    first, second = (torch.optim.SGD(each.parameters(), 1e-3) for each in model)
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**30)
        for step in range(24):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(loss_of(model[0], step) + loss_of(model[1], step)).backward()
            scaler.step(first)
            if fault:
                second.step()
            else:
                scaler.step(second)
            scaler.update()


@reported(Said("cleaned_gradients", "error", 9))
def an_infinite_batch_whose_gradients_are_set_to_zero(directory: Path, fault: bool) -> None:
    """Its batch norm does not survive it either, which is less than what made the step be taken."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**8)
        for step in range(20):
            optimizer.zero_grad()
            x = features(step)
            x[0, 0] = math.inf if fault and step == 9 else 0.0
            with half():
                loss = F.mse_loss(model(x).float(), torch.zeros(32, 1))
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
            scaler.step(optimizer)
            scaler.update()


@reported(Said("nonfinite_forward", "fatal", 0))
def twenty_batches_that_are_no_number_and_healthy_since(directory: Path, fault: bool) -> None:
    model = mlp()
    steps(directory, model, lambda s: regression(model, s) * (math.nan if fault and s < 20 else 1.0), 40)


@reported(Said("bad_batch", "warning", 9))
def a_loss_that_is_no_number_every_tenth_step(directory: Path, fault: bool) -> None:
    model = mlp()
    steps(
        directory,
        model,
        lambda s: regression(model, s) * (math.nan if fault and s % 10 == 9 else 1.0),
        40,
        init_scale=2.0**8,
    )


@reported(Said("weights_poisoned", "fatal", 12, "0"))
def bfloat16_without_a_scaler_that_would_skip(directory: Path, fault: bool) -> None:
    model = mlp().bfloat16()
    with recorded_optimizer(directory) as watched:
        optimizer = watched(torch.optim.AdamW(model.parameters(), 1e-3), model=model)
        for step in range(20):
            optimizer.zero_grad()
            x = features(step)
            x[0, 0] = math.inf if fault and step == 12 else 0.0
            loss = model(x.bfloat16()).float().square().mean()
            loss.backward()
            ampwatch.log(loss=loss)
            optimizer.step()


@reported()
def a_head_whose_targets_are_ten_times_as_large(directory: Path, fault: bool) -> None:
    """Three skips with a finite loss, of which training recovers."""
    body, heads = mlp(out=8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    model = nn.ModuleList([body, heads])

    def loss_at(step: int) -> Tensor:
        x, h = features(step), body(features(step))
        value = x[:, :1] * (30.0 if fault and step >= 25 else 3.0)
        return F.mse_loss(heads[0](h).float(), x[:, 1:2]) + F.mse_loss(heads[1](h).float(), value)

    steps(directory, model, loss_at, 50, init_scale=2.0**13)


@reported()
def a_norm_of_scaled_gradients_that_is_logged(directory: Path, fault: bool) -> None:
    """It doubles with the scale, a thousand times over in all, and is no divergence."""

    def body(step, model, optimizer, scaler):
        scaler.scale(loss_of(model, step)).backward()
        if fault:
            ampwatch.log(grad_norm=nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        scaler.step(optimizer)
        scaler.update()

    by_hand(directory, body, init_scale=4.0, growth_interval=1)


@reported()
def averaged_weights_and_a_schedule_that_is_not_told_of_skips(directory: Path, fault: bool) -> None:
    """Neither is harmed by a few steps of calibration; a scheduler made before or after the scaler does not warn."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    average = torch.optim.swa_utils.AveragedModel(model)
    with recorded(directory) as make:
        before = torch.optim.lr_scheduler.ConstantLR(optimizer)
        scaler = make(model=model, init_scale=2.0**20 if fault else 2.0**8)
        after = torch.optim.lr_scheduler.LinearLR(optimizer)
        optimizer.step()  # or torch warns of the schedulers where the first steps are skipped, as it does without us
        for step in range(40):
            train(model, scaler, lambda _, s=step: regression(model, s), steps=1, optimizer=optimizer)
            average.update_parameters(model)
            before.step()
            after.step()


@reported()
def a_schedule_that_takes_a_growth_for_a_skip(directory: Path, fault: bool) -> None:
    """What a loop makes of get_scale() is not seen; a schedule that lags harms nothing that the records tell."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    with recorded(directory) as make:
        scaler = make(model=model, growth_interval=2, init_scale=256.0)
        for step in range(20):
            scale = scaler.get_scale()
            train(model, scaler, lambda _, s=step: regression(model, s), steps=1, optimizer=optimizer)
            if scaler.get_scale() == scale if fault else scaler.get_scale() >= scale:
                schedule.step()


@reported()
def a_resume_that_forgets_when_the_scale_last_grew(directory: Path, fault: bool) -> None:
    """The scale itself goes on, and grows a little later."""
    model = mlp()
    optimizer, state = torch.optim.SGD(model.parameters(), 1e-3), {}
    for part in range(2):
        with recorded(directory) as make:
            scaler = make(model=model, growth_interval=20, init_scale=2.0**8)
            if state:
                scaler.load_state_dict(state | ({"_growth_tracker": 0} if fault else {}))
            train(
                model, scaler, lambda s, p=part: regression(model, 30 * p + s), steps=30, optimizer=optimizer
            )
            state = scaler.state_dict()


def told(directory: Path) -> list[Said]:
    return [
        Said(f.kind, f.severity, f.first_attempt, f.module or f.tensor or "")
        for f in worse_than_info(directory)
    ]


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_told_of_a_loop(name: str, tmp_path: Path):
    body, said = LOOPS[name]
    body(tmp_path, True)
    found = told(tmp_path)
    named = [
        each if wanted.where else each._replace(where="") for each, wanted in zip(found, said, strict=False)
    ]
    assert [*named, *found[len(said) :]] == said


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_without_its_fault_is_silent(name: str, tmp_path: Path):
    LOOPS[name][0](tmp_path, False)
    assert told(tmp_path) == []


def test_an_overflow_of_the_forward_pass_is_not_laid_to_an_eps(tmp_path: Path):
    model = nn.Linear(8, 1)
    with recorded(tmp_path) as make:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)
        train(
            model,
            make(model=model),
            lambda s: model(features(s) * 3e5).abs().mean(),
            optimizer=optimizer,
            steps=12,
        )
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity) == ("forward_overflow", "fatal")
    assert not [a for a in finding.advice if "eps" in a.text + a.code]


@pytest.mark.parametrize("factor", [1e20, 1.0])
def test_gradients_that_are_infinite_once_they_are_unscaled(tmp_path: Path, factor: float):
    """1e42 is 1e36 at a scale of 2^-20, which torch finds finite, and then divides; in float32, without autocast."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1e-30)
    optimizer = torch.optim.SGD(model.parameters(), 1e-44)
    with recorded(tmp_path) as make:
        scaler = make(model=model, init_scale=2.0**-20)
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(1, 1)) * 1e22 * (factor if step >= 3 else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    useless = Said("useless_scaler", "warning", 0)
    assert told(tmp_path) == [useless if factor == 1.0 else Said("weights_poisoned", "fatal", 3, "weight")]


def test_the_tensors_that_overflow_are_those_behind_the_narrow_place(tmp_path: Path):
    """Two layers, a cast to float16, two layers: gradients overflow at the cast and behind it, seen from the loss."""
    layers = nn.ModuleList(nn.Linear(8, n) for n in (8, 8, 8, 1))
    with recorded(tmp_path) as make:
        scaler, optimizer = make(model=layers, init_scale=2.0**22), torch.optim.SGD(layers.parameters(), 1e-3)
        narrow = layers[1](layers[0](features(0))).half()
        scaler.scale(layers[3](layers[2](narrow.float())).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    events = [
        event for batch in spool.read(tmp_path / "loop") if batch.kind == "events" for event in batch.events()
    ]
    names = {t["id"]: t["name"] for e in events if e.type == "tensors" for t in e.data["tensors"]}
    (skip,) = [event.data for event in events if event.type == "skip"]
    assert {names[tensor] for tensor in skip["tensors"]} == {"0.weight", "0.bias", "1.weight", "1.bias"}
