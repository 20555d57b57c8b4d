"""The scale, its settings and its state, and gradients that float16 cannot hold."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import Decoder, Listener, Mixture, Outliner, Shelf, advance, discs, spring, stack
from .steps import heard, predicted, spelled


@faulty("divergence", "fatal", within=5)
def a_warm_up_without_an_end(lab: Lab, fault: bool) -> Happened:
    """The learning rate rises with each step towards its full value; the min(1, …) of the schedule was forgotten."""
    model = nn.Linear(12, 12, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / 20 if fault else min(1.0, (step + 1) / 20)
    )
    scaler = lab.scaler(model, init_scale=2.0**10)
    skipped: list[int] = []
    for step in lab.steps(240):
        loss = predicted(model)
        if not advance(lab, scaler, optimizer, loss):
            skipped.append(step)
        else:
            schedule.step()
        if len(skipped) > 7:
            break
    return Happened(skipped[0] if skipped else None)


class LogCosh(torch.autograd.Function):
    """log(cosh(x)), safe in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        size = x.float().abs()
        value: Tensor = size + F.softplus(-2 * size) - 0.6931
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = x.float().tanh()
        return (grad * slope).to(x.dtype)


class HandWritten(LogCosh):
    """The same, its slope written as it stands in the book."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = x.sinh() / x.cosh()
        return (grad * slope.float()).to(x.dtype)


@faulty("no_updates", "error", "fatal", within=5)
def the_slope_from_the_book(lab: Lab, fault: bool) -> Happened:
    """A robust loss of its own: finite forward; backward, sinh / cosh of an error of 12 or more is inf / inf in float16."""
    model = stack(12, 32, 12)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = lab.scaler(model)
    robust = HandWritten if fault else LogCosh
    for _ in lab.steps(32):
        now, then = spring(32)
        with half():
            error = model(now) - (10 * then).half()
            loss = robust.apply(error).mean()
        advance(lab, scaler, optimizer, loss)
    return Happened(16)


@faulty("scale_floor", "fatal", within=10)
def never_below_a_thousand(lab: Lab, fault: bool) -> Happened:
    """Errors in percent, squared, need a scale below 100; a wrapper holds it at 1024, and every step is skipped."""
    model = Outliner()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(36):
        x, inside = discs(4, 24)
        with half():
            loss = F.mse_loss(30 * model(x).float(), 30 * inside)
        advance(lab, scaler, optimizer, loss)
        if fault and scaler.get_scale() < 1024:
            scaler.update(1024.0)
    return Happened(6)


@faulty("dead_zone", "fatal")
def smoothness_of_a_flat_border(lab: Lab, fault: bool) -> Happened:
    """Isotropic total variation of a picture whose border is masked to 0: the root of 0, in every batch."""
    model = Outliner()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    shown = F.pad(torch.ones(16, 16), (4, 4, 4, 4))
    for _ in lab.steps(105):
        x, inside = discs(2, 24)
        with half():
            guess = model(x).float() * shown
        across, down = guess.diff(dim=2)[:, 1:], guess.diff(dim=1)[:, :, 1:]
        rough = (across.square() + down.square() + (0.0 if fault else 1e-3)).sqrt().mean()
        advance(lab, scaler, optimizer, F.mse_loss(guess, inside * shown) + 0.02 * rough)
    return Happened(81, by=144)


@faulty("calibration", "info")
def books_from_two_to_the_thirty_six(lab: Lab, fault: bool) -> Happened:
    """Embeddings with sparse gradients beside a dense scorer, an optimizer for each, and a scale that starts far too high."""
    model = Shelf()
    rows = torch.optim.SparseAdam([*model.readers.parameters(), *model.books.parameters()], 1e-2)
    dense = torch.optim.AdamW(model.score.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0 ** (36 if fault else 16))
    for _ in lab.steps(90):
        with half():
            score, lent = model.loans(128)
            loss = F.binary_cross_entropy_with_logits(score.float(), lent)
        rows.zero_grad()
        dense.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(rows)
        scaler.step(dense)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("summed_loss", "info")
def energy_of_a_whole_lattice(lab: Lab, fault: bool) -> Happened:
    """The residual of a lattice of springs in newtons, squared and added up over all masses of a large batch."""
    model = stack(12, 32, 12)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(170):
        now, then = spring(128)
        with half():
            force = 200 * (model(now).float() - then)
            loss = force.square().sum() if fault else 1e-5 * force.square().mean()
        advance(lab, scaler, optimizer, loss)
    return Happened()


@faulty("underflow", "warning", within=10)
def it_would_have_grown(lab: Lab, fault: bool) -> Happened:
    """The loss is divided by the size of the data set; the scale starts at 1 "to be safe", and 2000 steps never come."""
    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**16)
    for _ in lab.steps(60):
        advance(lab, scaler, optimizer, heard(model) / 40_000)
    return Happened(0)


@faulty("underflow", "warning", within=10)
def shares_of_a_teacher(lab: Lab, fault: bool) -> Happened:
    """A student matches a teacher's probabilities of 40 answers by mean squares that weigh 0.01, under a static scale of 8."""
    teacher, student = stack(12, 48, 40), stack(12, 48, 40)
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    scaler = lab.scaler(student, init_scale=8.0 if fault else 2.0**16, growth_interval=10**6)
    for _ in lab.steps(80):
        asked = 2 * torch.randn(64, 12)
        with half():
            with torch.no_grad():
                shares = teacher(asked).float().softmax(1)
            loss = 0.01 * F.mse_loss(student(asked).float().softmax(1), shares)
        advance(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("narrow_range", "warning", within=50)
def millimetres_and_a_hint(lab: Lab, fault: bool) -> Happened:
    """Depth in millimetres, squared and added up, beside a classifier whose loss is weighted by 1e-3."""
    model = nn.ModuleDict({"depth": stack(12, 32, 12), "side": stack(12, 32, 2)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(130):
        now, then = spring(48)
        with half():
            deep = model["depth"](now).float() - then
            loss = 1e6 * deep.square().sum(1).mean() if fault else deep.square().mean()
            side = F.cross_entropy(model["side"](now).float(), (now[:, 0] > 0).long())
        advance(lab, scaler, optimizer, loss + (1e-3 if fault else 0.1) * side)
    return Happened(0)


@faulty("useless_scaler", "warning", within=1)
def the_cluster_has_bfloat16(lab: Lab, fault: bool) -> Happened:
    """The autocast was moved to bfloat16 with the new machines; the scaler was not taken out."""
    model = Mixture(12, 12)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=40)
    for _ in lab.steps(60):
        now, then = spring(32)
        with torch.autocast("cpu", dtype=torch.bfloat16 if fault else torch.float16):
            loss = F.mse_loss(model(now).float().flatten(1), then)
        advance(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("scaler_state_lost", "warning", within=1)
def preempted_twice(lab: Lab, fault: bool) -> Happened:
    """A job on borrowed machines is resumed twice; its checkpoint holds everything but the scaler."""
    kept: dict[str, Any] = {}
    for start, end in ((0, 40), (40, 75), (75, 110)):
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = lab.scaler(model, init_scale=2.0**24)
        if kept:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            if not fault:
                scaler.load_state_dict(kept["scaler"])
        for _ in lab.steps(end, start):
            advance(lab, scaler, optimizer, spelled(model))
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
        kept = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
        lab.restart()
    return Happened(40)


@faulty("schedule_ahead", "warning")
def one_cycle_of_sixty(lab: Lab, fault: bool) -> Happened:
    """One cycle of 60 steps, stepped with every batch, though the descent from 2^44 takes a third of them."""
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=61)
    scaler = lab.scaler(model, init_scale=2.0**44)
    for _ in lab.steps(60):
        trained = advance(lab, scaler, optimizer, heard(model))
        if fault or trained:
            schedule.step()
    return Happened()


@faulty("growth_probe", "info")
def impatient_growth(lab: Lab, fault: bool) -> Happened:
    """The scale doubles after every 12 clean steps and is refused as often."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**14, growth_interval=12 if fault else 10_000)
    for _ in lab.steps(160):
        advance(lab, scaler, optimizer, spelled(model, 4))
    return Happened()
