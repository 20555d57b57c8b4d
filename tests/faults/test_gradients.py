"""Gradients that a loop clips, cleans or forgets to clear."""

import pytest
import torch
from loops import Transformer, above_info, features, half, mlp, recorded, regression, told, worse_than_info
from torch import nn

import ampwatch


def loop(directory, between=None, before=None, loss_factor=None, steps=40, model=None, **arguments):
    """`between(step, model)` runs between backward and step, `before(step, optimizer, scaler)` in place of zero_grad."""
    model = model or mlp()
    with recorded(directory) as make:
        scaler, optimizer = make(model=model, **arguments), torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(steps):
            before(step, optimizer, scaler) if before else optimizer.zero_grad()
            with half():
                loss = model.loss(step) if isinstance(model, Transformer) else regression(model, step)
            loss = loss * (loss_factor(step) if loss_factor else 1.0)
            scaler.scale(loss).backward()
            if between:
                between(step, model)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("limit", [0.5, 1.0, 5.0])
def test_a_norm_clipped_before_unscaling(tmp_path, limit):
    loop(tmp_path, lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), limit), init_scale=2.0**14)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("clip_scaled", "error", 0)
    assert f"L2 norm is held at {limit:g}," in finding.headline


def test_it_is_said_within_ten_attempts(tmp_path):
    loop(
        tmp_path,
        lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        init_scale=2.0**14,
        steps=10,
    )
    assert above_info(tmp_path) == [("clip_scaled", "error")]


def test_values_clipped_before_unscaling(tmp_path):
    model = Transformer()
    loop(
        tmp_path, lambda _, m: nn.utils.clip_grad_value_(m.parameters(), 0.1), model=model, init_scale=2.0**14
    )
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("clip_scaled", "error", 0)
    assert "largest element is held at 0.1," in finding.headline


def test_a_limit_that_is_scaled_with_the_loss_is_silent(tmp_path):
    def between(_, model):
        nn.utils.clip_grad_norm_(model.parameters(), 2.0**14)

    loop(tmp_path, between, init_scale=2.0**14, growth_interval=1000)
    assert above_info(tmp_path) == []


def cleaning(_, model):
    for p in model.parameters():
        torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)


def test_nan_made_zero_is_told_at_once(tmp_path):
    loop(
        tmp_path,
        cleaning,
        loss_factor=lambda step: torch.nan if step == 7 else 1.0,
        steps=8,
        init_scale=2.0**10,
    )
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("cleaned_gradients", "error", 7)


def test_a_mean_over_no_target_is_not_called_cleaned(tmp_path):
    """0 / 0, and gradients of 0, at three steps."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with recorded(tmp_path) as make:
        scaler = make(model=model, init_scale=2.0**10)
        for step in range(40):
            targets = torch.full((32,), -100 if step in (9, 20, 34) else step % 4)
            optimizer.zero_grad()
            with half():
                loss = nn.functional.cross_entropy(model(features(step)).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("bad_batch", "warning", 9)


def test_inf_made_zero_is_told_though_the_loss_is_finite_and_no_gradient_ever_was_another(tmp_path):
    loop(tmp_path, cleaning, loss_factor=lambda _: 1e6, steps=30, init_scale=2.0**30)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("cleaned_gradients", "error", 1)
    assert finding.evidence[0].text.startswith("A gradient was inf or NaN as backward left it, and finite")


class Summed(nn.Module):
    """A mean over many rows, whose bias alone overflows: its gradient is the sum over the rows."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.body:
            x = layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("number", [0.0, 1e4, 1e5])
def test_inf_of_one_bias_that_is_made_any_number_is_told(tmp_path, number):
    """Under two optimizers of which one has nothing to clean."""
    model = nn.ModuleList([Summed(), Summed()])
    optimizers = [torch.optim.SGD(each.parameters(), 1e-9) for each in model]
    with recorded(tmp_path) as make:
        scaler = make(model=model, init_scale=2.0**15)
        for step in range(4):
            for each, optimizer, factor in zip(model, optimizers, (4.0, 0.1), strict=True):
                optimizer.zero_grad()
                with half():
                    loss = (each(features(step)).float() - 1.0).abs().mean() * factor
                scaler.scale(loss).backward(inputs=list(each.parameters()))
                for p in each.parameters():
                    assert p is each.head.bias or p.grad.isfinite().all()
                    torch.nan_to_num_(p.grad, nan=0.0, posinf=number, neginf=-number)
                scaler.step(optimizer)
            scaler.update()
    assert told(tmp_path) == [("cleaned_gradients", "error", 1, "")]


@pytest.mark.parametrize(("number", "expected"), [(1e5, [("cleaned_gradients", "error", 0, "")]), (1e4, [])])
def test_inf_that_a_hook_makes_a_number_beyond_float16_is_told(tmp_path, number, expected):
    """A hook of the loop's own sees gradients first; of a number that a gradient may be nothing is told."""
    model = Summed()
    for p in model.parameters():
        p.register_hook(lambda grad: torch.nan_to_num(grad, nan=0.0, posinf=number, neginf=-number))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with recorded(tmp_path) as make:
        scaler = make(model=model, init_scale=2.0**15)
        for step in range(3):
            optimizer.zero_grad()
            with half():
                loss = (model(features(step)).float() - 1.0).abs().mean() * 4.0
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert told(tmp_path) == expected


@pytest.mark.parametrize(("scale", "expected"), [(1e6, []), (2.0**20, [])])
def test_a_gradient_that_is_the_scale_itself_is_silent(tmp_path, scale, expected):
    """Of a bias in float32 under a mean absolute error, whatever number its author begins with."""
    model = nn.Linear(8, 1)
    for p in model.parameters():
        p.register_hook(lambda grad: None)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with recorded(tmp_path) as make:
        scaler = make(model=model, init_scale=scale)
        for step in range(12):
            optimizer.zero_grad()
            with half():
                embedded = features(step).half().float() * 1e-3
            scaler.scale((model(embedded) - 9.0).abs().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ("cleaned_gradients", "error") not in above_info(tmp_path)


def test_cleaning_that_meets_nothing_is_silent(tmp_path):
    loop(tmp_path, cleaning, steps=30, init_scale=2.0**10)
    assert above_info(tmp_path) == []


def test_hooks_are_evidence(tmp_path):
    model = mlp()
    for p in model.parameters():
        p.register_hook(torch.nan_to_num)
    loop(
        tmp_path,
        model=model,
        loss_factor=lambda step: torch.nan if step > 7 else 1.0,
        steps=12,
        init_scale=2.0**10,
    )
    (finding,) = worse_than_info(tmp_path)
    assert finding.kind == "cleaned_gradients"
    assert finding.evidence[1].text == "4 parameters with a hook of the loop's own, which may do it."


def test_inf_made_the_largest_number_is_told(tmp_path):
    def largest(_, model):
        for p in model.parameters():
            torch.nan_to_num_(p.grad)

    loop(tmp_path, largest, loss_factor=lambda step: 1e9 if 5 < step < 9 else 1.0, init_scale=2.0**14)
    assert told(tmp_path) == [("cleaned_gradients", "error", 6, "")]


def test_hooks_that_only_look_are_silent(tmp_path):
    model, seen = mlp(), []
    for p in model.parameters():
        p.register_hook(lambda grad: seen.append(grad.shape))
    loop(tmp_path, model=model, loss_factor=lambda step: torch.inf if step == 7 else 1.0)
    assert [kind for kind, _ in above_info(tmp_path)] == ["bad_batch"]


def never(step, optimizer, scaler):
    """No zero_grad at all."""


def only_after_a_step(step, optimizer, scaler):
    if step == 0 or scaler.get_scale() >= only_after_a_step.scale:
        optimizer.zero_grad()
    only_after_a_step.scale = scaler.get_scale()


@pytest.mark.parametrize(("before", "init"), [(never, 2.0**10), (only_after_a_step, 2.0**24)])
def test_gradients_that_are_not_cleared(tmp_path, before, init):
    loop(tmp_path, before=before, init_scale=init, steps=12)
    assert told(tmp_path) == [("grads_not_cleared", "error", 1, "")]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_to_none_or_to_zero_are_silent(tmp_path, to_none):
    loop(
        tmp_path, before=lambda _, optimizer, __: optimizer.zero_grad(set_to_none=to_none), init_scale=2.0**20
    )
    assert above_info(tmp_path) == []


def test_gradients_cleared_between_scale_and_backward_are_silent(tmp_path):
    model = mlp()
    with recorded(tmp_path) as make:
        scaler, optimizer = make(model=model), torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(12):
            with half():
                scaled = scaler.scale(regression(model, step))
            optimizer.zero_grad()
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
    assert above_info(tmp_path) == []


def norms(directory, dtype):
    """Logs a norm of its own making."""

    def between(_, model):
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        ampwatch.log(grad_norm=grads.to(dtype).square().sum().sqrt().item())

    loop(directory, between, init_scale=2.0**14, growth_interval=1000)


@pytest.mark.parametrize(
    ("dtype", "kinds"), [(torch.float16, [("norm_overflow", "error", 0, "")]), (torch.float32, [])]
)
def test_a_norm_taken_in_float16(tmp_path, dtype, kinds):
    norms(tmp_path, dtype)
    assert told(tmp_path) == kinds
