"""Faults of the calling code: scale, unscale_, step and update in a wrong order."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lab import Happened, Lab, faulty, half
from .models import Causal, Dreamer, Glyphs, Perceptron, Reader, Tagger, curve, pictures
from .text import language, tagging


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
