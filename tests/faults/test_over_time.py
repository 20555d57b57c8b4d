"""Faults that show over many attempts: batches that come again, scalers made anew, optimizers that starve, schedules."""

import copy

import pytest
import torch
from loops import (
    Transformer,
    above_info,
    features,
    findings,
    half,
    mlp,
    recorded,
    regression,
    told,
    train,
    worse_than_info,
)
from test_scale import Distance
from torch import nn
from torch.nn import functional as F

import ampwatch


def epochs(directory, bad, log, steps=60, length=20):
    """Passes over 20 batches, of which some hold a value that is missing."""
    model = mlp()
    with recorded(directory) as make:
        scaler, optimizer = make(model=model, init_scale=2.0**10), torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(steps):
            x = features(step % length)
            if step % length in bad:
                x[3, 2] = torch.nan
            optimizer.zero_grad()
            with half():
                loss = F.mse_loss(model(x).float(), torch.zeros(32, 1))
            if log:
                ampwatch.log(**{name: value(step) for name, value in log.items()})
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ({"batch_id": lambda step: step % 20}, "Batch 13 gives a loss"),
        ({"epoch": lambda step: step // 20}, "attempt 13 of it"),
        ({}, "every 20 attempts"),
    ],
)
def test_a_batch_that_comes_again_is_the_cause(tmp_path, log, said):
    epochs(tmp_path, {13}, log)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("bad_batch", "warning", 13)
    assert said in finding.headline


def test_good_batches_are_silent(tmp_path):
    epochs(tmp_path, set(), {"batch_id": lambda step: step % 20})
    assert above_info(tmp_path) == []


def by_epoch(directory, anew, restore=False):
    """Three epochs of 15 steps on features that want a scale of 2^10 or so, with a scaler made once, or for each."""
    model = mlp()
    with recorded(directory) as make:
        optimizer, scaler, state = torch.optim.SGD(model.parameters(), 1e-9), None, None
        for epoch in range(3):
            if scaler is None or anew:
                scaler = make(model=model)
                if restore and state:
                    scaler.load_state_dict(state)
            train(
                model,
                scaler,
                lambda step, epoch=epoch: regression(model, 15 * epoch + step) * 100.0,
                steps=15,
                optimizer=optimizer,
            )
            state = scaler.state_dict()


def test_a_scaler_made_anew_in_every_epoch(tmp_path):
    by_epoch(tmp_path, anew=True)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("scaler_state_lost", "warning", 15)
    assert finding.evidence[0].value == 2
    assert "2^7 and began at 2^16, at step 6 (attempt 15)" in finding.headline  # 9 of the 15 were skipped


@pytest.mark.parametrize(("anew", "restore"), [(False, False), (True, True)])
def test_one_scaler_or_one_whose_state_is_loaded_is_silent(tmp_path, anew, restore):
    by_epoch(tmp_path, anew, restore)
    assert above_info(tmp_path) == []


def resumed(directory, restore):
    """A job and the one that goes on with it, in the same run."""
    model, state, optimizer = mlp(), None, None
    for job in range(2):
        with recorded(directory) as make:
            scaler = make(model=model)
            optimizer = torch.optim.SGD(model.parameters(), 1e-9)
            if state and restore:
                scaler.load_state_dict(state)
            for step in range(15):
                ampwatch.log(step=15 * job + step)
                loss_at = lambda _, s=15 * job + step: regression(model, s) * 100.0  # noqa: E731
                train(model, scaler, loss_at, steps=1, optimizer=optimizer)
            state = scaler.state_dict()


@pytest.mark.parametrize(("restore", "kinds"), [(False, ["scaler_state_lost"]), (True, [])])
def test_a_resume_with_and_without_the_state_of_the_scaler(tmp_path, restore, kinds):
    resumed(tmp_path, restore)
    assert [kind for kind, _ in above_info(tmp_path)] == kinds


def two_losses(directory, eps, steps=40):
    """A regression, and distances whose gradient is NaN without an eps, each with an optimizer, under one scaler."""
    first, second = mlp(), Distance(eps)
    with recorded(directory) as make:
        scaler = make(model=nn.ModuleList([first, second]))
        optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in (first, second)]
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with half():
                loss = regression(first, step) + second(features(step)).mean()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()


def test_one_optimizer_starves_another(tmp_path):
    two_losses(tmp_path, eps=0.0)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("many_optimizers", "error", 0)
    assert finding.headline.startswith("SGD (optimizer 1) is skipped in every attempt")


def test_two_optimizers_that_both_step_are_silent(tmp_path):
    two_losses(tmp_path, eps=1e-6)
    assert above_info(tmp_path) == []


def now_and_then(directory, weight, interval, own=False, steps=120):
    """Every 12th step is the turn of a loss of its own, with an optimizer of its own or not."""
    model, head = mlp(out=8), nn.Linear(8, 1)
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**12, growth_interval=interval)
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        lazy = torch.optim.SGD(head.parameters(), 1e-9) if own else optimizer
        for step in range(steps):
            turn = lazy if step % 12 == 11 else optimizer
            turn.zero_grad()
            optimizer.zero_grad()
            with half():
                out = model(features(0)).float()
                loss = out.square().mean() if turn is not lazy or step % 12 != 11 else 0.0
                if step % 12 == 11:
                    loss = head(out if not own else out.detach()).float().square().mean() * weight
            scaler.scale(loss).backward()
            scaler.step(turn)
            scaler.update()


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_that_comes_now_and_then_and_is_always_skipped(tmp_path, own):
    now_and_then(tmp_path, weight=1e4, interval=4, own=own)
    assert [kind for kind, _ in above_info(tmp_path)] == ["many_optimizers"]


def test_a_loss_that_comes_now_and_then_with_an_ordinary_weight_is_silent(tmp_path):
    now_and_then(tmp_path, weight=1.0, interval=1000)
    assert above_info(tmp_path) == []


def warmed_up(directory, careful, steps=60):
    model = mlp()
    with recorded(directory) as make:
        scaler, optimizer = make(model=model, init_scale=2.0**32), torch.optim.SGD(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 8) * 0.999**i)
        optimizer.step()  # the scheduler wants one before its own
        for step in range(steps):
            before = scaler.get_scale()
            train(model, scaler, lambda _, step=step: regression(model, step), steps=1, optimizer=optimizer)
            if not careful or scaler.get_scale() >= before:
                schedule.step()


def test_a_warm_up_that_passes_while_every_step_is_skipped(tmp_path):
    warmed_up(tmp_path, careful=False)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("schedule_ahead", "warning", 1)
    assert "before the first step was taken, at step 0 (attempt " in finding.headline


def test_a_schedule_that_waits_for_the_optimizer_is_silent(tmp_path):
    warmed_up(tmp_path, careful=True)
    assert [f.kind for f in findings(tmp_path)] == ["calibration"]


def accumulated(directory, divide, lengths=(4, 4, 4, 4, 4, 2), windows=36):
    """Passes whose last window is shorter than the others."""
    model = mlp()
    with recorded(directory) as make:
        scaler, optimizer = make(model=model, init_scale=2.0**10), torch.optim.SGD(model.parameters(), 1e-5)
        for window in range(windows):
            length = lengths[window % len(lengths)]
            optimizer.zero_grad()
            for part in range(length):
                with half():
                    loss = regression(model, 10 * window + part) / divide(length)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def test_a_loss_that_is_not_divided_by_the_micro_batches(tmp_path):
    accumulated(tmp_path, lambda length: 1)
    assert told(tmp_path) == [("accumulation", "warning", 5, "")]


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4, 4, 2), (4,), (1, 8, 2, 4)])
def test_a_loss_that_is_divided_is_silent(tmp_path, lengths):
    accumulated(tmp_path, lambda length: length, lengths)
    assert above_info(tmp_path) == []


def test_windows_of_one_length_tell_nothing(tmp_path):
    accumulated(tmp_path, lambda length: 1, (4,))
    assert above_info(tmp_path) == []


def far_apart(directory, weight, steps=70):
    """A layer whose gradients reach the end of float16, and a model whose loss hardly counts beside it."""
    greater, lesser = nn.Linear(8, 64), Transformer(16)
    model = nn.ModuleList([greater, lesser])
    with recorded(directory) as scaler:
        train(
            model,
            scaler(model=model, init_scale=2.0**16, growth_interval=10),
            lambda step: (greater(features(step)) * 4.0).float().square().mean() + lesser.loss(step) * weight,
            steps=steps,
            optimizer=torch.optim.SGD(model.parameters(), 1e-9),
        )


@pytest.mark.parametrize(
    ("weight", "kinds"),
    [(2.0**-30, [("narrow_range", "warning", 0, "1.mixers.0.project.weight")]), (1e-2, [])],
)
def test_gradients_too_far_apart_for_one_scale(tmp_path, weight, kinds):
    far_apart(tmp_path, weight)
    assert told(tmp_path) == kinds


def test_a_loss_summed_over_many_samples_is_explained(tmp_path):
    model, x = nn.Linear(8, 1), features(0, rows=20_000) + 2
    with recorded(tmp_path) as scaler:
        train(
            model,
            scaler(model=model),
            lambda step: (model(x).float() - 3).square().sum(),
            steps=140,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-7),
        )
    assert [(f.kind, f.severity, f.first_attempt) for f in findings(tmp_path)] == [
        ("summed_loss", "info", 19),
        ("calibration", "info", 0),
    ]


def divided_by(directory, *, new_scale, steps=60, interval=8):
    """A loop that scales by hand, as frameworks do: where it divides by the grown scale, a step at each growth is halved."""
    model, scale, clean, lines = mlp(), 2.0**10, 0, ["attempt,scale,found_inf,loss,grad_norm,scale_after"]
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        with half():
            loss = regression(model, 0)
        (loss * scale).backward()
        grads = [p.grad for p in model.parameters()]
        found_inf = not all(g.isfinite().all() for g in grads)
        clean = 0 if found_inf else clean + 1
        after = scale / 2 if found_inf else scale * 2 if clean % interval == 0 else scale
        for g in grads:
            g.div_(after if new_scale else scale)
        norm = torch.stack([g.norm() for g in grads]).norm()
        lines.append(f"{step},{scale},{int(found_inf)},{float(loss.detach())},{float(norm)},{after}")
        if not found_inf:
            optimizer.step()
        scale = after
    trace = directory / "trace.csv"
    trace.write_text("\n".join(lines))
    found = ampwatch.diagnose(trace, policy="deepspeed")
    return [(f.kind, f.severity, f.first_attempt) for f in found if f.kind != "growth_probe"]


def test_gradients_that_are_divided_by_the_next_scale(tmp_path):
    assert divided_by(tmp_path, new_scale=True) == [("unscaled_by_new_scale", "info", 7)]


def test_gradients_that_are_divided_by_their_own_scale_are_silent(tmp_path):
    assert divided_by(tmp_path, new_scale=False) == []


def fresh_again(directory, make_optimizer, restore, steps=46, every=15, rate=10.0):
    """A scaler made for 2^16 where features want 2^10 or so; `restore(state, model, optimizer, scaler)` at each epoch."""
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**22)
        fresh = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scaler.state_dict()])
        for step in range(steps):
            if step and step % every == 0:
                restore(copy.deepcopy(fresh), model, optimizer, scaler)
            loss_at = lambda _, s=step: regression(model, s) * rate  # noqa: E731
            train(model, scaler, loss_at, steps=1, optimizer=optimizer)
    return told(directory)


def adam(parameters):
    return torch.optim.AdamW(parameters, 1e-3)


def its_own(fresh, _model, _optimizer, scaler):
    scaler.load_state_dict(fresh[2])


def of_all(fresh, *objects):
    for each, state in zip(objects, fresh, strict=True):
        each.load_state_dict(state)


def of_all_the_scaler_first(fresh, *objects):
    of_all(fresh[::-1], *objects[::-1])


def what_stands(_fresh, _model, _optimizer, scaler):
    scaler.load_state_dict(scaler.state_dict())


def in_two_steps(fresh, _model, _optimizer, scaler):
    now = scaler.state_dict()
    scaler.load_state_dict(fresh[2])
    scaler.load_state_dict(now)


@pytest.mark.parametrize("steps", [16, 46])
def test_a_scaler_alone_that_is_given_its_first_state_again(tmp_path, steps):
    assert fresh_again(tmp_path, adam, its_own, steps) == [("scaler_state_lost", "warning", 15, "")]
    (finding,) = worse_than_info(tmp_path)
    assert finding.evidence[0].value == steps // 15


def sgd(parameters):
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9)


@pytest.mark.parametrize("every", [40, 2])
def test_without_a_count_of_steps_it_is_told_by_weights_that_nobody_has_written_to(tmp_path, every):
    seen = fresh_again(tmp_path, sgd, its_own, steps=every + 2, every=every, rate=1.0)
    assert seen == [("scaler_state_lost", "warning", every, "")]


def its_own_and_a_limit(fresh, model, _optimizer, scaler):
    scaler.load_state_dict(fresh[2])
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-1, 1)


@pytest.mark.parametrize(("every", "expected"), [(40, 40), (2, None)])
def test_where_somebody_has_the_loss_tells_that_training_goes_on(tmp_path, every, expected):
    """While it has not fallen yet, it may be another training's."""
    seen = fresh_again(tmp_path, sgd, its_own_and_a_limit, steps=every + 2, every=every, rate=1.0)
    assert seen == ([("scaler_state_lost", "warning", expected, "")] if expected else [])


def anew(fresh, model, optimizer, scaler):
    """Another training with the same objects."""
    for each in model[::2]:
        each.reset_parameters()
    optimizer.load_state_dict(fresh[1])
    scaler.load_state_dict(fresh[2])


@pytest.mark.parametrize("restore", [of_all, of_all_the_scaler_first, anew])
def test_weights_that_are_given_back_too_are_another_training(tmp_path, restore):
    assert fresh_again(tmp_path, sgd, restore, steps=10, every=4, rate=1.0) == []


def test_one_of_two_scalers_that_is_given_its_first_state_again(tmp_path):
    model = nn.ModuleList([mlp(), mlp()])
    optimizers = [adam(each.parameters()) for each in model]
    with recorded(tmp_path) as make:
        scalers = [make(model=each, init_scale=2.0**22) for each in model]
        fresh = scalers[1].state_dict()
        for step in range(16):
            if step == 15:
                scalers[1].load_state_dict(fresh)
            for each, optimizer, scaler in zip(model, optimizers, scalers, strict=True):
                loss_at = lambda _, m=each, s=step: regression(m, s) * 10.0  # noqa: E731
                train(each, scaler, loss_at, steps=1, optimizer=optimizer)
    assert told(tmp_path) == [("scaler_state_lost", "warning", 31, "")]


@pytest.mark.parametrize("restore", [of_all, of_all_the_scaler_first, what_stands, in_two_steps])
@pytest.mark.parametrize("make_optimizer", [adam, lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)])
def test_a_training_that_begins_anew_or_a_state_that_stood_there_is_silent(tmp_path, make_optimizer, restore):
    assert fresh_again(tmp_path, make_optimizer, restore) == []
