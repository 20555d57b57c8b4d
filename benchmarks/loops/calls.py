"""Faults of the calling code: wrong order, a step past the scaler, gradients handled at the wrong moment."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .forward import descend
from .lab import Happened, Lab, faulty, half
from .models import Causal, Dreamer, Glyphs, Perceptron, Reader, Tagger, Tastes, curve, pictures, sentences


def language(model: nn.Module, batch: int = 8) -> Tensor:
    tokens = sentences(batch)
    with half():
        return F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def tagging(model: nn.Module, batch: int = 8) -> Tensor:
    tokens = sentences(batch)
    with half():
        return F.cross_entropy(model(tokens).float().flatten(0, 1), (tokens % 4).flatten())


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def norm_logged_by_a_second_unscale(lab: Lab, fault: bool) -> Happened:
    """Gradients are unscaled for clipping and, from an evaluation on, once more for a log of the norm."""
    onset = 25 + lab.seed % 5
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(50):
        loss = tagging(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault and step >= onset:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return Happened(onset)


@faulty("call_order", "error", within=4)
def update_after_every_micro_batch(lab: Lab, fault: bool) -> Happened:
    """Accumulation over four, with clipping and update() outside of the `if`: earlier parts are unscaled again."""
    model = Glyphs(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(120):
        x, y = pictures(8)
        with half():
            loss = F.cross_entropy(model(x).float(), y) / 4
        scaler.scale(loss).backward()
        last = step % 4 == 3
        if last or fault:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if last:
            scaler.step(optimizer)
            optimizer.zero_grad()
        if last or fault:
            scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def clipping_of_every_micro_batch(lab: Lab, fault: bool) -> Happened:
    """unscale_ and clipping inside the accumulation window."""
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        optimizer.zero_grad()
        for micro in range(3):
            scaler.scale(language(model) / 3).backward()
            if fault or micro == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=1)
def clipping_of_the_first_micro_batch(lab: Lab, fault: bool) -> Happened:
    """unscale_ after the first of two backward passes: the second adds scaled gradients to unscaled ones."""
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        optimizer.zero_grad()
        scaler.scale(language(model) / 2).backward()
        if fault:
            scaler.unscale_(optimizer)
        scaler.scale(language(model) / 2).backward()
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def update_was_forgotten(lab: Lab, fault: bool) -> Happened:
    """step() in the loop, update() nowhere."""
    model = Dreamer()
    optimizer = torch.optim.RAdam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        x = torch.randn(32, 16)
        with half():
            back, mean, _ = model(x)
            loss = F.mse_loss(back.float(), x) + 0.01 * mean.square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not fault:
            scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def second_order_optimizer(lab: Lab, fault: bool) -> Happened:
    """L-BFGS with a closure, which a scaler cannot serve."""
    model = Perceptron(8, 16, 1)
    optimizer: torch.optim.Optimizer = (
        torch.optim.LBFGS(model.parameters(), 0.1) if fault else torch.optim.Rprop(model.parameters(), 0.01)
    )
    scaler = lab.scaler(model)
    x, y = curve(64)
    for _ in lab.steps(30):

        def closure() -> Tensor:
            optimizer.zero_grad()
            with half():
                loss = F.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            return loss

        if fault:
            scaler.step(optimizer, closure=closure)
        else:
            closure()
            scaler.step(optimizer)
        scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=2, per_step=2)
def generator_steps_after_update(lab: Lab, fault: bool) -> Happened:
    """Both losses are scaled, the critic stepped and the scale updated; only then comes the generator's step."""
    maker, judge = Perceptron(4, 16, 8), Perceptron(8, 16, 1)
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    one, two = torch.optim.Adam(judge.parameters(), 1e-3), torch.optim.Adam(maker.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        real = torch.randn(16, 8) * 0.5 + 1
        with half():
            fake = maker(torch.randn(16, 4))
            loss_judge = (
                F.softplus(judge(fake.detach()).float()).mean() + F.softplus(-judge(real).float()).mean()
            )
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss_judge).backward()
        with half():
            loss_maker = F.softplus(-judge(fake).float()).mean()
        gradients = [p.grad.clone() for p in judge.parameters() if p.grad is not None]
        scaler.scale(loss_maker).backward()
        for p, g in zip(judge.parameters(), gradients, strict=True):
            p.grad = g
        scaler.step(one)
        if fault:
            scaler.update()
        scaler.step(two)
        scaler.update()
    return Happened(0)


@faulty("no_gradients", "error", within=1, raises=(AssertionError,))
def encoder_behind_a_detach(lab: Lab, fault: bool) -> Happened:
    """A loss computed from `.detach()`ed features, for logging, is the one trained on."""
    encoder, head = Perceptron(8, 24, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    one, two = torch.optim.Adam(head.parameters(), 1e-3), torch.optim.Adam(encoder.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        x, y = curve(32)
        with half():
            features = encoder(x)
            loss = F.mse_loss(head(features.detach() if fault else features).float(), y)
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()
    return Happened(0)


@faulty("no_gradients", "error", within=1, raises=(AssertionError,))
def optimizer_of_the_copy(lab: Lab, fault: bool) -> Happened:
    """The optimizer was made from the EMA copy, not from the model that is trained."""
    model = Tastes()
    shadow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW((shadow if fault else model).parameters(), 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        user, item = torch.randint(50, (64,)), torch.randint(60, (64,))
        with half():
            loss = F.mse_loss(model(user, item).float(), ((user + item) % 5).float() / 4)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("shared_parameter", "error", within=1)
def embedding_in_two_optimizers(lab: Lab, fault: bool) -> Happened:
    """The embedding has an optimizer of its own and was left in the model's too: it is unscaled twice."""
    model = Tagger()
    rest = [p for n, p in model.named_parameters() if fault or not n.startswith("words")]
    one, two = torch.optim.Adagrad(model.words.parameters(), 0.05), torch.optim.AdamW(rest, 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        loss = tagging(model)
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()
    return Happened(0)


@faulty("clip_scaled", "error", within=10)
def norm_clipped_before_unscale(lab: Lab, fault: bool) -> Happened:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scaler = lab.scaler(model, init_scale=2.0**13)
    for _ in lab.steps(60):
        loss = tagging(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("clip_scaled", "error", within=10)
def value_clipped_before_unscale(lab: Lab, fault: bool) -> Happened:
    model = Glyphs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = lab.scaler(model, init_scale=2.0**12, growth_interval=20)
    for _ in lab.steps(70):
        x, y = pictures(16)
        with half():
            loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("cleaned_gradients", "error", within=1)
def hooks_that_clean(lab: Lab, fault: bool) -> Happened:
    """nan_to_num in a hook on every parameter, so that a broken picture is trained on."""
    onset = 30 + lab.seed % 5
    model = Glyphs(batch_norm=False)
    if fault:
        for p in model.parameters():
            p.register_hook(lambda g: torch.nan_to_num(g, 0.0, 0.0, 0.0))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(70):
        x, y = pictures(16)
        if fault and step >= onset and (step - onset) % 4 == 0:
            x[0] = math.nan
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("grads_not_cleared", "error", within=3)
def cleared_only_after_a_step(lab: Lab, fault: bool) -> Happened:
    """zero_grad only if the scale did not fall: what was not finite once stays so."""
    model = Dreamer()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**22)
    for _ in lab.steps(60):
        x = torch.randn(32, 16)
        with half():
            back, mean, spread = model(x)
            kl = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
            loss = F.mse_loss(back.float(), x) + 0.01 * kl
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if not fault or scaler.get_scale() >= before:
            optimizer.zero_grad()
        lab.note(loss)
    return Happened(0)


@faulty("grads_not_cleared", "error", within=3)
def never_cleared(lab: Lab, fault: bool) -> Happened:
    """No zero_grad anywhere."""
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for _ in lab.steps(70):
        if not fault:
            optimizer.zero_grad()
        loss = language(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("scaler_bypassed", "error", within=10)
def one_step_too_many(lab: Lab, fault: bool) -> Happened:
    """optimizer.step() stayed in the loop when the scaler was put in."""
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        loss = language(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if fault:
            optimizer.step()
    return Happened(0)


@faulty("scaler_bypassed", "error", within=10)
def only_scale_is_used(lab: Lab, fault: bool) -> Happened:
    """scale(loss).backward(), then the optimizer's own step; the scaler never steps."""
    model = Tastes()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        user, item = torch.randint(50, (64,)), torch.randint(60, (64,))
        with half():
            loss = F.mse_loss(model(user, item).float(), ((user * item) % 3).float())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return Happened(0)


@faulty("scaler_bypassed", "error", within=10)
def half_of_the_losses_unscaled(lab: Lab, fault: bool) -> Happened:
    """A helper that trains on replayed batches calls backward() on the bare loss, then the scaler's step."""
    onset = 40
    model = Glyphs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.8)
    scaler = lab.scaler(model)
    for step in lab.steps(90):
        x, y = pictures(16)
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        if fault and step >= onset and step % 2:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return Happened(onset + 1)


@faulty("scaler_bypassed", "error", within=10)
def stepped_directly_in_a_branch(lab: Lab, fault: bool) -> Happened:
    """A fine-tuning phase after the warm-up forgets the scaler's step for one of two optimizers."""
    onset = 30
    encoder, head = Perceptron(8, 24, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    one, two = torch.optim.Adam(encoder.parameters(), 1e-3), torch.optim.SGD(head.parameters(), 0.05)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for step in lab.steps(80):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(head(encoder(x)).float(), y)
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        if fault and step >= onset:
            one.step()
        else:
            scaler.step(one)
        scaler.step(two)
        scaler.update()
    return Happened(onset)


@faulty("accumulation", "warning")
def windows_of_two_and_six(lab: Lab, fault: bool) -> Happened:
    """Not divided by the number of micro-batches, which changes with the length of the texts."""
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for step in lab.steps(36):
        size = (2, 6, 3)[step % 3]
        optimizer.zero_grad()
        for _ in range(size):
            loss = language(model, 16)
            scaler.scale(loss if fault else loss / size).backward()
        scaler.step(optimizer)
        scaler.update()
    return Happened(0, by=9)


@faulty("many_optimizers", "error", "warning", within=48)
def lazy_regulariser(lab: Lab, fault: bool) -> Happened:
    """A heavy term every 16 steps while the scale doubles every 8 clean ones: it is always skipped."""
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=8 if fault else 2000, init_scale=2.0**12)
    for step in lab.steps(150):
        x, y = curve(32)
        with half():
            out = model(x).float()
            loss = F.mse_loss(out, y)
            if step % 16 == 15:
                loss = loss + (4096 if fault else 1) * F.mse_loss(out, y.roll(1))
        descend(lab, scaler, optimizer, loss)
    return Happened(31)


class Eager(torch.optim.Optimizer):
    """A fused optimizer of a colleague's: takes the scale, forgets to look at found_inf."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        scale = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad if scale is None else p.grad / scale, alpha=-group["lr"])


@faulty("fused_optimizer", "fatal", within=2, accept=("weights_poisoned",))
def kernel_that_ignores_overflow(lab: Lab, fault: bool) -> Happened:
    onset = 20
    model = Perceptron(8, 32, 32, 1)
    optimizer = (Eager if fault else torch.optim.SGD)(model.parameters(), 0.02)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for step in lab.steps(50):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(model(x).float(), y) * (1e6 if step == onset else 1.0)
        descend(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("scaler_state_lost", "warning")
def a_scaler_for_every_epoch(lab: Lab, fault: bool) -> Happened:
    """The scaler is made inside the function that trains one epoch."""
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**22)
    for step in lab.steps(90):
        if step and step % 15 == 0 and fault:
            scaler = lab.scaler(model, init_scale=2.0**22)
        descend(lab, scaler, optimizer, language(model))
    return Happened(15, by=16)


@faulty("schedule_ahead", "info")
def warmup_counts_skipped_steps(lab: Lab, fault: bool) -> Happened:
    """A few skips at the start, counted by the schedule: harmless."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=40)
    scaler = lab.scaler(model, init_scale=2.0**22)
    for _ in lab.steps(90):
        before = scaler.get_scale()
        descend(lab, scaler, optimizer, language(model))
        if fault or scaler.get_scale() >= before:
            schedule.step()
    return Happened(0)


@faulty("schedule_ahead", "warning")
def warmup_over_before_it_began(lab: Lab, fault: bool) -> Happened:
    """A warm-up of eight steps, all of which are lost to the calibration of a scale of 2^36."""
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=8)
    scaler = lab.scaler(model, init_scale=2.0**36)
    for _ in lab.steps(90):
        before = scaler.get_scale()
        descend(lab, scaler, optimizer, language(model))
        if fault or scaler.get_scale() >= before:
            schedule.step()
    return Happened(0)


@faulty("low_precision_params", "warning", within=1)
def weights_in_bfloat16(lab: Lab, fault: bool) -> Happened:
    """The model was cast for memory; torch's scaler takes it without a word."""
    model: nn.Module = Perceptron(8, 32, 1)
    if fault:
        model = model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("low_precision_params", "error", within=1, raises=(ValueError,))
def weights_in_float16(lab: Lab, fault: bool) -> Happened:
    """model.half() and a scaler: torch refuses to unscale."""
    model = Glyphs(batch_norm=False)
    if fault:
        model.half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        x, y = pictures(8)
        with half():
            loss = F.cross_entropy(model(x.half() if fault else x).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


class Spectral(nn.Module):
    def __init__(self, complex_: bool) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.cfloat) if complex_ else torch.randn(9, 2))
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter)
        return self.out(torch.fft.irfft(torch.fft.rfft(x.float()) * weights, n=16))


@faulty("low_precision_params", "error", within=1, raises=(NotImplementedError, RuntimeError))
def spectral_filter(lab: Lab, fault: bool) -> Happened:
    """A learned filter held as complex numbers."""
    model = Spectral(fault)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        x, y = curve(32, 16)
        with half():
            loss = F.mse_loss(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("missing_scaler", "error", within=1)
def scaler_turned_off(lab: Lab, fault: bool) -> Happened:
    """float16 autocast with enabled=False, left from a bfloat16 configuration."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, enabled=not fault)
    for _ in lab.steps(50):
        descend(lab, scaler, optimizer, language(model))
    return Happened(0)


@faulty("backend_limit", "warning", accept=("missing_scaler",), within=10)
def scaler_for_another_device(lab: Lab, fault: bool) -> Happened:
    """A scaler for CUDA on a machine without it: torch warns once and scales nothing."""
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, "cuda" if fault else "cpu")
    for _ in lab.steps(40):
        descend(lab, scaler, optimizer, tagging(model))
    return Happened(0)


@faulty("epsilon_underflow", "fatal", within=1, accept=("low_precision_params",))
def adam_on_half_weights(lab: Lab, fault: bool) -> Happened:
    """Fused Adam takes float16 weights; 1e-8 is 0 there, and an unused row becomes 0/0."""
    bag, head = nn.Embedding(60, 12), nn.Linear(12, 4)
    model = nn.ModuleDict({"bag": bag, "head": head})
    if fault:
        model.half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-8, fused=True)
    scaler = lab.scaler(model, init_scale=256.0)
    for _ in lab.steps(30):
        words = torch.randint(0, 30, (16, 6))
        with half():
            loss = F.cross_entropy(head(bag(words).mean(1)).float(), words[:, 0] % 4)
        descend(lab, scaler, optimizer, loss)
    return Happened(0)
