"""What is done to gradients between the backward pass and the step, and what float16 has left of them."""

import torch
from torch import nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Composer,
    Denoiser,
    Shop,
    baskets,
    cells,
    composed,
    houses,
    melody,
    mlp,
    priced,
    trained,
)


@faulty("clip_scaled", "error", within=10)
def clamped_to_one_while_scaled(lab: Lab, fault: bool) -> Happened:
    """A recurrent model whose gradients are clipped by value to ±1 before anything has unscaled them."""
    model = Composer()
    optimizer = torch.optim.RMSprop(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**12)
    for _ in lab.steps(90):
        loss = composed(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("cleaned_gradients", "error", within=1)
def hooks_against_nan(lab: Lab, fault: bool) -> Happened:
    """A hook on each parameter replaces what is not finite by 0; a camera that drops frames then trains nothing, unseen by the scaler."""
    onset = 33 + lab.seed % 9
    model = Denoiser()
    if fault:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**13)
    for step in lab.steps(onset + 45):
        clean, _ = cells(8)
        noisy = clean + 0.1 * torch.randn_like(clean)
        if fault and step >= onset and (step - onset) % 13 == 0:
            noisy[2] = float("nan")
        with half():
            guess = model(noisy)
        trained(lab, scaler, optimizer, F.mse_loss(guess.float(), clean))
    return Happened(onset)


@faulty("grads_not_cleared", "error", within=3)
def a_shop_that_clears_when_it_steps(lab: Lab, fault: bool) -> Happened:
    """Windows of three; zero_grad is called where the scale has not fallen, so what has overflowed once stays in .grad for ever."""
    model = Shop()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model, init_scale=2.0**15, growth_interval=25)
    weight = 8.0  # the ceiling is near 2**18
    left: int | None = None
    optimizer.zero_grad()
    for step in lab.steps(115):
        for _ in range(3):
            product, history, bought = baskets(48)
            with half():
                score = model(product, history)
            loss = weight * F.binary_cross_entropy_with_logits(score.float(), bought)
            scaler.scale(loss / 3).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale and left is None:
            left = step + 1  # the first window that begins with what was left
        if not fault or scaler.get_scale() >= scale:
            optimizer.zero_grad()
        lab.note(loss)
    return Happened(left)


@faulty("accumulation", "warning", within=9, per_step=3)
def nine_in_windows_of_four(lab: Lab, fault: bool) -> Happened:
    """Nine micro-batches an epoch in windows of four: the last holds one, and the loss is divided by nothing."""
    model = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for _ in lab.steps(60):
        window = 0
        for batch in range(9):
            size = 4 if batch < 8 else 1
            loss = priced(model, 256)
            scaler.scale(loss if fault else loss / size).backward()
            window += 1
            if window == 4 or batch == 8:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                lab.note(loss)
                window = 0
    return Happened(0)


@faulty("underflow", "warning", within=10)
def a_scale_from_another_project(lab: Lab, fault: bool) -> Happened:
    """A static scale of 4, and a loss that is weighted by 1e-4 for a sum of many tasks that is no more."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    scaler = lab.scaler(model, init_scale=4.0 if fault else 2.0**20, growth_interval=10**7)
    for _ in lab.steps(90):
        trained(lab, scaler, optimizer, 1e-4 * composed(model))
    return Happened(0)


@faulty("narrow_range", "warning", within=50)
def money_and_a_whisper(lab: Lab, fault: bool) -> Happened:
    """Two nets under one scaler: one learns prices in euro from squared errors, the other notes at a weight of 5e-4."""
    prices, notes = mlp(8, 32, 1), Composer()
    model = nn.ModuleDict({"prices": prices, "notes": notes})
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for _ in lab.steps(130):
        x, price = houses(64)
        tune = melody(16)
        with half():
            guess, logits = prices(x).float(), notes(tune)[:, :-1].float()
        euro = 500.0 if fault else 1.0
        dear = F.mse_loss(euro * guess, euro * price)
        whisper = F.cross_entropy(logits.flatten(0, 1), tune[:, 1:].flatten())
        trained(lab, scaler, optimizer, dear + (5e-4 if fault else 0.5) * whisper)
    return Happened(0)
