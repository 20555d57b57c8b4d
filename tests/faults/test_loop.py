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


def told(directory):
    """(kind, severity, attempt it was first said at) of what a person would be told."""
    return [(f.kind, f.severity, f.first_attempt) for f in worse_than_info(directory)]


@pytest.mark.parametrize(("again", "expected"), [(True, [("scaler_bypassed", "error", 2)]), (False, [])])
def test_gradients_that_are_applied_once_more_after_update(tmp_path, again, expected):
    def body(step, model, optimizer, scaler):
        scaler.step(optimizer)
        scaler.update()
        if again:
            optimizer.step()

    run(tmp_path, body)
    assert told(tmp_path) == expected


@pytest.mark.parametrize(("direct", "expected"), [(True, [("scaler_bypassed", "error", 0)]), (False, [])])
def test_losses_that_are_scaled_and_an_optimizer_that_the_scaler_never_sees(tmp_path, direct, expected):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with recorded(tmp_path) as make:
        scaler = make(model=model)
        for step in range(12):
            optimizer.zero_grad()
            with half():
                loss = regression(model, step)
            scaler.scale(loss).backward()
            if direct:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    assert told(tmp_path) == expected


@pytest.mark.parametrize(("early", "expected"), [(True, [("call_order", "error", 1)]), (False, [])])
def test_an_update_before_the_second_of_two_steps(tmp_path, early, expected):
    model = nn.ModuleList([mlp(), mlp()])
    with recorded(tmp_path) as make:
        scaler, optimizers = make(model=model), [torch.optim.SGD(m.parameters(), 1e-3) for m in model]
        for step in range(12):
            for each, optimizer in zip(model, optimizers, strict=True):
                optimizer.zero_grad()
                with half():
                    loss = regression(each, step)
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                if early:
                    scaler.update()
            if not early:
                scaler.update()
    assert told(tmp_path) == expected


def halves(directory, second_step, first_loss=None, steps=12):
    """An encoder and a decoder with an optimizer each; `second_step(scaler, loss, decoding)` follows step and update of the first."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), nn.Linear(4, 1))
    with recorded(directory) as make:
        scaler, (encoding, decoding) = (
            make(model=model, init_scale=2.0**10),
            [torch.optim.Adam(m.parameters(), 1e-3) for m in model],
        )
        for step in range(steps):
            encoding.zero_grad()
            decoding.zero_grad()
            with half():
                loss = regression(model, step)
            scaler.scale(loss).backward(retain_graph=True)
            scaler.step(encoding)
            scaler.update()
            second_step(scaler, loss, decoding)
    return told(directory)


def of_the_same_pass(scaler, _loss, decoding):
    scaler.step(decoding)
    scaler.update()


def of_the_same_pass_unscaled(scaler, _loss, decoding):
    scaler.unscale_(decoding)
    scaler.step(decoding)
    scaler.update()


def of_a_pass_of_its_own(scaler, loss, decoding):
    decoding.zero_grad()
    scaler.scale(loss).backward(inputs=[p for group in decoding.param_groups for p in group["params"]])
    scaler.step(decoding)
    scaler.update()


def of_a_bare_pass(scaler, loss, decoding):
    decoding.zero_grad()
    loss.backward(inputs=[p for group in decoding.param_groups for p in group["params"]])
    scaler.step(decoding)
    scaler.update()


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("second_step", [of_the_same_pass, of_the_same_pass_unscaled])
def test_an_update_between_two_halves_of_one_pass_is_told_in_the_first_iteration(
    tmp_path, second_step, steps
):
    assert halves(tmp_path, second_step, steps=steps) == [("call_order", "error", 1)]


@pytest.mark.parametrize(
    ("second_step", "expected"),
    [(of_a_pass_of_its_own, []), (of_a_bare_pass, [("scaler_bypassed", "error", 1)])],
)
def test_an_update_between_two_passes(tmp_path, second_step, expected):
    assert halves(tmp_path, second_step) == expected


@pytest.mark.parametrize(("each", "expected"), [(True, [("call_order", "error", 1)]), (False, [])])
def test_micro_batches_that_are_unscaled_one_by_one(tmp_path, each, expected):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with recorded(tmp_path) as make:
        scaler = make(model=model, init_scale=2.0**8)
        for step in range(24):
            with half():
                loss = regression(model, step) / 4
            scaler.scale(loss).backward()
            if each or step % 4 == 3:
                scaler.unscale_(optimizer)
            if step % 4 == 3:
                scaler.step(optimizer)
                optimizer.zero_grad()
            if each or step % 4 == 3:
                scaler.update()
    assert told(tmp_path) == expected


def actor_and_critic(directory, step_actor, actor_loss=torch.amp.GradScaler.scale, steps=12):
    """Two optimizers; `step_actor(scaler, optimizer)` is how the loop steps the second of them."""
    model = nn.ModuleList([mlp(), mlp()])
    with recorded(directory) as make:
        scaler = make(model=model)
        critic, actor = (torch.optim.Adam(m.parameters(), 1e-3) for m in model)
        for step in range(steps):
            critic.zero_grad()
            actor.zero_grad()
            with half():
                losses = [regression(m, step) for m in model]
            scaler.scale(losses[0]).backward()
            actor_loss(scaler, losses[1]).backward()
            scaler.step(critic)
            step_actor(scaler, actor)
            scaler.update()
    return told(directory)


def test_a_second_optimizer_that_is_stepped_with_scaled_gradients(tmp_path):
    said = actor_and_critic(tmp_path, lambda scaler, actor: actor.step())
    assert said == [("scaler_bypassed", "error", 1)]


def test_one_that_goes_through_the_scaler_is_healthy(tmp_path):
    assert actor_and_critic(tmp_path, lambda scaler, actor: scaler.step(actor)) == []


@pytest.mark.parametrize(("in_float16", "expected"), [(True, [("scaler_bypassed", "error", 2)]), (False, [])])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_one_whose_loss_is_never_scaled_is_a_fault_in_float16(tmp_path, in_float16, expected, clip):
    models = nn.ModuleList([mlp(), mlp()])
    with recorded(tmp_path) as make:
        scaler = make(model=models)
        ours, stranger = (torch.optim.Adam(m.parameters(), 1e-3) for m in models)
        for step in range(16):
            train(models[0], scaler, lambda _, s=step: regression(models[0], s), steps=1, optimizer=ours)
            stranger.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=in_float16):
                loss = regression(models[1], step)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(models[1].parameters(), clip)
            stranger.step()
    assert told(tmp_path) == expected


def by_hand(stranger, model, step):
    loss = regression(model, step) * 1024
    loss.backward()
    for p in model.parameters():
        p.grad /= 1024
    stranger.step()


def by_torch(stranger, model, step, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)):
    scaler.scale(regression(model, step)).backward()
    scaler.step(stranger)
    scaler.update()


@pytest.mark.parametrize("trained", [by_hand, by_torch])
def test_one_that_is_scaled_by_hand_or_by_a_scaler_of_its_own_is_healthy(tmp_path, trained):
    models = nn.ModuleList([mlp(), mlp()])
    with recorded(tmp_path) as make:
        scaler = make(model=models)
        ours, stranger = (torch.optim.Adam(m.parameters(), 1e-3) for m in models)
        for step in range(16):
            train(models[0], scaler, lambda _, s=step: regression(models[0], s), steps=1, optimizer=ours)
            stranger.zero_grad()
            with half():
                trained(stranger, models[1], step)
    assert told(tmp_path) == []


@pytest.mark.parametrize(("used", "words"), [(True, "still scaled"), (False, "never used")])
def test_losses_that_are_scaled_for_nothing(tmp_path, used, words):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with recorded(tmp_path) as make:
        scaler = make(model=model)
        for step in range(12):
            optimizer.zero_grad()
            with half():
                loss = regression(model, step)
            scaled = scaler.scale(loss)
            (scaled if used else loss).backward()
            optimizer.step()
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, words in finding.headline) == ("scaler_bypassed", True)


def test_whether_gradients_are_scaled_is_told_by_the_pass_and_not_by_the_call(tmp_path):
    """Beside an optimizer that the scaler steps one that it never does, for whose loss scale() was called in vain."""

    def unused(scaler, loss):
        scaler.scale(loss)
        return loss

    assert actor_and_critic(tmp_path, lambda scaler, actor: actor.step(), unused) == [
        ("scaler_bypassed", "error", 1)
    ]
    (finding,) = worse_than_info(tmp_path)
    assert "float16 gradients of a loss that is not scaled" in finding.headline


class Inner(torch.optim.Optimizer):
    """A wrapper that has another optimizer do its steps, as Lookahead and SAM do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self):
        self.inner.step()


def test_the_inner_optimizer_of_a_wrapper_is_no_stranger(tmp_path):
    model = mlp()
    optimizer = Inner(torch.optim.SGD(model.parameters(), 1e-3))
    with recorded(tmp_path) as make:
        train(model, make(model=model), lambda step: regression(model, step), optimizer=optimizer)
    assert told(tmp_path) == []


def test_a_scaler_each_and_nobody_is_a_stranger(tmp_path):
    models = [mlp(), mlp()]
    with recorded(tmp_path) as make:
        optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in models]
        scalers = [make(model=m, init_scale=2.0**8) for m in models]
        for step in range(12):
            for m, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                train(m, scaler, lambda _, m=m, s=step: regression(m, s), steps=1, optimizer=optimizer)
    assert told(tmp_path) == []


def now_and_then(directory, dtype, by_itself, *, clips=False, parts=1):
    """Each sixth batch has code of its own, which may clip, or accumulate its gradients of parts."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**10)
        for step in range(24):
            if by_itself and step % 6 == 5:
                optimizer.zero_grad()
                for part in range(parts):
                    with torch.autocast("cpu", dtype=torch.float16, enabled=dtype is torch.float16):
                        loss = regression(model, step + part)
                    (loss / parts).backward()
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
            else:
                train(
                    model, scaler, lambda _, step=step: regression(model, step), steps=1, optimizer=optimizer
                )
    return told(directory)


def test_a_step_of_a_float16_loss_that_was_never_scaled(tmp_path):
    assert now_and_then(tmp_path, torch.float16, by_itself=True) == [("scaler_bypassed", "error", 5)]


@pytest.mark.parametrize("touched", [{"clips": True}, {"parts": 3}, {"clips": True, "parts": 3}])
def test_it_is_told_at_the_second_time_where_gradients_are_clipped_or_accumulated(tmp_path, touched):
    told = now_and_then(tmp_path / "float16", torch.float16, by_itself=True, **touched)
    assert told == [("scaler_bypassed", "error", 10)]
    assert now_and_then(tmp_path / "float32", torch.float32, by_itself=True, **touched) == []


def test_a_phase_in_float32_or_none_is_healthy(tmp_path):
    assert now_and_then(tmp_path / "float32", torch.float32, by_itself=True) == []
    assert now_and_then(tmp_path / "none", torch.float16, by_itself=False) == []


def test_a_step_after_unscale_is_told_as_one(tmp_path):
    def body(step, model, optimizer, scaler):
        scaler.unscale_(optimizer)
        optimizer.step()
        scaler.update()

    run(tmp_path, body)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, "stepped directly after unscale_()" in finding.headline) == (
        "scaler_bypassed",
        True,
    )
