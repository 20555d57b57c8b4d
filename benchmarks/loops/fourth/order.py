"""Calls in a wrong order, left out, made twice, or made on something else."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Adapter,
    Composer,
    Humming,
    Potters,
    Segmenter,
    Towers,
    cells,
    dense,
    leaves,
    melodies,
    paired,
    rings,
    settle,
    sung,
    turn,
    views,
    weather,
)


def foretold(model: nn.Module, batch: int = 48) -> Tensor:
    now, then = weather(batch)
    with half():
        return F.mse_loss(model(now).float(), then)


def sorted_leaves(model: nn.Module, batch: int = 48) -> Tensor:
    x, kind = leaves(batch)
    with half():
        return F.cross_entropy(model(x).float(), kind)


@faulty("call_order", "error", raises=(RuntimeError,), within=1)
def unscaled_with_each_part_of_a_batch(lab: Lab, fault: bool) -> Happened:
    """Two parts of each batch are accumulated; the norm of each is wanted, so unscale_ stands inside the loop over parts."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        optimizer.zero_grad()
        for part in range(2):
            with half():
                loss = sung(model, melodies(12)) / 2
            scaler.scale(loss).backward()
            if fault or part == 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            lab.note(loss)
        settle(scaler, optimizer)
    return Happened(0)


@faulty("call_order", "error", within=1)
def a_spike_raised_and_swallowed(lab: Lab, fault: bool) -> Happened:
    """A norm that is too large raises between unscale_ and update(); from then on unscale_ itself raises, and each is swallowed."""
    model = dense(16, 32, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(60):
        loss = sorted_leaves(model)
        lab.note(loss)
        optimizer.zero_grad()
        try:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == 25:
                raise ValueError("the gradient norm is too large")
            scaler.step(optimizer)
            scaler.update()
        except (ValueError, RuntimeError):
            if not fault:
                scaler.update()
    return Happened(25)


@faulty("call_order", "error", raises=(RuntimeError,), within=1)
def the_second_scaler_is_never_updated(lab: Lab, fault: bool) -> Happened:
    """Maker and critic have a scaler each; update() was written for one of them."""
    model = Potters()
    makers = torch.optim.Adam(model.maker.parameters(), 1e-3)
    critics = torch.optim.Adam(model.critic.parameters(), 1e-3)
    first, second = lab.scaler(model), lab.scaler(model)
    for _ in lab.steps(40):
        critics.zero_grad()
        with half():
            false, true = model.critic(model.made().detach()), model.critic(rings())
        loss = F.softplus(false.float()).mean() + F.softplus(-true.float()).mean()
        second.scale(loss).backward()
        second.step(critics)
        if not fault:
            second.update()
        makers.zero_grad()
        with half():
            false = model.critic(model.made())
        first.scale(F.softplus(-false.float()).mean()).backward()
        first.step(makers)
        first.update()
        lab.note(loss)
    return Happened(0)


@faulty("no_gradients", "error", raises=(AssertionError,), within=1)
def adapters_that_were_never_put_in(lab: Lab, fault: bool) -> Happened:
    """Adapters are made and given to the optimizer; the layer of the model is not replaced by its adapted one."""
    model = dense(16, 32, 6).requires_grad_(False)
    adapter = Adapter(model[0])
    if not fault:
        model[0] = adapter
    optimizer = torch.optim.AdamW([adapter.narrow.weight, adapter.wide.weight], 1e-2)
    if fault:
        model[2].bias.requires_grad_(True)  # the loss has a graph all the same
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        turn(lab, scaler, optimizer, sorted_leaves(model))
    return Happened(0)


@faulty("no_gradients", "error", raises=(AssertionError,), within=1)
def a_loss_rebuilt_from_its_number(lab: Lab, fault: bool) -> Happened:
    """Two losses are averaged by way of .item(), and the mean is made to require a gradient so that backward() works."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        losses = [foretold(model), foretold(model)]
        mean = (losses[0] + losses[1]) / 2
        if fault:
            mean = torch.tensor(mean.item(), requires_grad=True)
        turn(lab, scaler, optimizer, mean)
    return Happened(0)


@faulty("shared_parameter", "error", within=1)
def a_temperature_in_both_optimizers(lab: Lab, fault: bool) -> Happened:
    """An optimizer for each tower, and both were also given the temperature that the towers share."""
    model = Towers()
    left = torch.optim.AdamW([*model.seen.parameters(), model.warmth], 1e-3)
    right = torch.optim.AdamW([*model.read.parameters(), *([model.warmth] if fault else [])], 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        with half():
            loss = paired(model(*views(32)))
        left.zero_grad()
        right.zero_grad()
        scaler.scale(loss).backward()
        settle(scaler, left, right)
        lab.note(loss)
    return Happened(0)


@faulty("clip_scaled", "error", within=10)
def clipped_and_then_unscaled(lab: Lab, fault: bool) -> Happened:
    """clip_grad_norm_ stands one line above unscale_ in the loop of a recurrent network."""
    model = Humming()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        with half():
            loss = sung(model, melodies(24))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault:
            scaler.unscale_(optimizer)
        settle(scaler, optimizer)
        lab.note(loss)
    return Happened(0)


@faulty("cleaned_gradients", "error", within=1)
def infinities_made_numbers_before_clipping(lab: Lab, fault: bool) -> Happened:
    """torch.nan_to_num_ over all gradients "for stability": the scale of 2^30 never falls, and clipping makes the steps 0."""
    model = Segmenter(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = lab.scaler(model, init_scale=2.0**30)
    for _ in lab.steps(50):
        x, mask = cells(8)
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), mask)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault:
            for p in model.parameters():
                torch.nan_to_num_(p.grad)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        settle(scaler, optimizer)
        lab.note(loss)
    return Happened(0)


@faulty("cleaned_gradients", "error", within=1)
def zeros_for_a_broken_batch(lab: Lab, fault: bool) -> Happened:
    """Readings that are NaN, at step 24 and 40: their gradients are set to 0, and the step is taken on momentum alone."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(60):
        now, then = weather(48)
        if fault and step in (24, 40):
            now[7, 2] = torch.nan
        with half():
            loss = F.mse_loss(model(now).float(), then)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault:
            for p in model.parameters():
                p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
        settle(scaler, optimizer)
        lab.note(loss)
    return Happened(24)


@faulty("grads_not_cleared", "error", within=3)
def the_copy_is_cleared(lab: Lab, fault: bool) -> Happened:
    """At step 30 the best model so far is kept as a deep copy, under the name by which gradients are cleared."""
    model = trained = dense(16, 32, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = lab.scaler(model)
    for step in lab.steps(70):
        if step == 30:
            best = copy.deepcopy(trained)
            if fault:
                model = best
        loss = sorted_leaves(trained)
        model.zero_grad()
        scaler.scale(loss).backward()
        settle(scaler, optimizer)
        lab.note(loss)
    return Happened(30)


class Paced:
    """A warm-up as in an old tutorial: it sets the learning rate, and steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, steps: bool) -> None:
        self.optimizer, self.steps, self.count = optimizer, steps, 0

    def step_and_update_lr(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, self.count / 20)
        if self.steps:
            self.optimizer.step()


@faulty("scaler_bypassed", "error", within=2)
def a_schedule_that_steps_as_well(lab: Lab, fault: bool) -> Happened:
    """The class that paces the learning rate calls optimizer.step() too, after the scaler's: each gradient is applied twice."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    pace = Paced(optimizer, steps=fault)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        with half():
            loss = sung(model, melodies(24))
        turn(lab, scaler, optimizer, loss)
        pace.step_and_update_lr()
    return Happened(0)


@faulty("scaler_bypassed", "error", within=10)
def divided_by_hand_from_a_merge_on(lab: Lab, fault: bool) -> Happened:
    """From step 40 on a merged branch divides gradients by the scale, which step() does too."""
    model = Segmenter(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        x, mask = cells(8)
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), mask)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault and step >= 40:
            for p in model.parameters():
                p.grad.div_(scaler.get_scale())
        settle(scaler, optimizer)
        lab.note(loss)
    return Happened(40)


@faulty("accumulation", "warning")
def windows_that_grow(lab: Lab, fault: bool) -> Happened:
    """Windows of 1, 2, 4 and 8 parts in turn as a sampler fills them; their losses are added up, not averaged."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    scaler = lab.scaler(model, init_scale=2.0**12)
    for step in lab.steps(60):
        parts = (1, 2, 4, 8)[step % 4]
        optimizer.zero_grad()
        for _ in range(parts):
            with half():
                loss = sung(model, melodies(8))
            scaler.scale(loss if fault else loss / parts).backward()
            lab.note(loss)
        settle(scaler, optimizer)
    return Happened(0)


@faulty("many_optimizers", "error", "warning")
def a_perceptual_loss_every_tenth_time(lab: Lab, fault: bool) -> Happened:
    """Every tenth iteration a heavy loss joins and overflows; in between the scale, growing every 8 steps, is back where it was."""
    model = Segmenter(norm=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=8 if fault else 2000)
    for step in lab.steps(150):
        x, mask = cells(8)
        with half():
            out = model(x).float()
            loss = F.binary_cross_entropy_with_logits(out, mask)
            if step % 10 == 9:
                edges = (out.diff(dim=2) - mask.diff(dim=2)).square().mean()
                loss = loss + (3e3 if fault else 1.0) * edges
        turn(lab, scaler, optimizer, loss)
    return Happened()


@faulty("missing_scaler", "error", within=1)
def the_scaler_stayed_behind(lab: Lab, fault: bool) -> Happened:
    """A loop was rewritten without its scaler; the autocast to float16 came along."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    if fault:
        lab.watch(optimizer, model)
    else:
        scaler = lab.scaler(model)
    for _ in lab.steps(50):
        loss = foretold(model)
        if not fault:
            turn(lab, scaler, optimizer, loss)
            continue
        optimizer.zero_grad()
        loss.backward()
        lab.log(loss=lab.note(loss))
        optimizer.step()
    return Happened(0)


@faulty("missing_scaler", "error", within=1)
def enabled_for_another_flag(lab: Lab, fault: bool) -> Happened:
    """The scaler is enabled where "bf16" is not asked for, by a test that was turned round."""
    model = Humming()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, enabled=not fault)
    for _ in lab.steps(40):
        with half():
            loss = sung(model, melodies(16))
        turn(lab, scaler, optimizer, loss)
    return Happened(0)
