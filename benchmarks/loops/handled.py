"""Faults of gradients: none, those of others, handled at the wrong moment, or stepped past the scaler."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from .forward import descend
from .lab import Happened, Lab, faulty, half
from .models import Causal, Dreamer, Glyphs, Perceptron, Reader, Tagger, Tastes, curve, pictures
from .text import language, tagging


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
