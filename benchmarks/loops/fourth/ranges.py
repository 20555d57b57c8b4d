"""The scale, its settings, its state and its schedule; and what an engine that is not torch's does with it."""

import copy
import csv
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Adapter,
    Composer,
    Denoiser,
    Humming,
    denoised,
    dense,
    melodies,
    settle,
    sung,
    turn,
    weather,
)
from .order import foretold, sorted_leaves


@faulty("calibration", "info")
def adapters_from_two_to_the_twenty_eight(lab: Lab, fault: bool) -> Happened:
    """Adapters on a frozen model, and an initial scale from somebody else's configuration."""
    model = dense(16, 32, 6).requires_grad_(False)
    model[0], model[2] = Adapter(model[0]), Adapter(model[2])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-3)
    scaler = lab.scaler(model, init_scale=2.0 ** (28 if fault else 14))
    for _ in lab.steps(90):
        turn(lab, scaler, optimizer, sorted_leaves(model))
    return Happened(0)


@faulty("growth_probe", "info")
def a_ceiling_touched_every_fifteen_steps(lab: Lab, fault: bool) -> Happened:
    """The growth interval was shortened to 15 for a short run; each growth costs one step."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**13, growth_interval=15 if fault else 10_000)
    for _ in lab.steps(220):
        with half():
            loss = denoised(model)
        turn(lab, scaler, optimizer, loss)
    return Happened()


@faulty("narrow_range", "warning", within=50)
def huge_returns_and_a_little_entropy(lab: Lab, fault: bool) -> Happened:
    """A critic of returns near 10^4 and an actor whose bonus for entropy weighs 1e-6: no scale is right for both."""
    model = nn.ModuleDict({"actor": dense(10, 32, 5), "critic": dense(10, 32, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=20)
    for _ in lab.steps(160):
        seen, then = weather(64)
        with half():
            value, logits = model["critic"](seen).float(), model["actor"](seen).float()
        chances = logits.log_softmax(1)
        entropy = -(chances.exp() * chances).sum(1).mean()
        if fault:
            loss = F.mse_loss(value, 1e4 * (1 + then[:, :1])) - 1e-6 * entropy
        else:
            loss = F.mse_loss(value, 1 + then[:, :1]) - 0.1 * entropy
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("useless_scaler", "warning")
def noise_in_bfloat16_with_a_scaler(lab: Lab, fault: bool) -> Happened:
    """A diffusion model in bfloat16; the scaler comes with the template."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=20)
    for _ in lab.steps(90):
        with torch.autocast("cpu", dtype=torch.bfloat16 if fault else torch.float16):
            loss = denoised(model)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("scaler_state_lost", "warning", within=1)
def a_scaler_made_after_the_checkpoint_was_loaded(lab: Lab, fault: bool) -> Happened:
    """On resuming, the state is loaded into a scaler that the next line replaces by a new one."""
    model, kept = Composer(), {}
    for start, end in ((0, 60), (60, 120)):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = lab.scaler(model, init_scale=2.0**26)
        if kept:
            optimizer.load_state_dict(kept["optimizer"])
            if not fault:
                scaler.load_state_dict(kept["scaler"])
        for _ in lab.steps(end, start):
            with half():
                loss = sung(model, melodies(24))
            turn(lab, scaler, optimizer, loss)
        kept = {
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "scaler": copy.deepcopy(scaler.state_dict()),
        }
        lab.restart()
    return Happened(60)


@faulty("scaler_state_lost", "warning", within=1)
def a_new_scaler_after_each_validation(lab: Lab, fault: bool) -> Happened:
    """fit() makes its scaler itself, and is called once for each 30 steps, with a validation in between."""
    model = Humming()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**25)
    for step in lab.steps(120):
        if fault and step and step % 30 == 0:
            scaler = lab.scaler(model, init_scale=2.0**25)
        with half():
            loss = sung(model, melodies(24))
        turn(lab, scaler, optimizer, loss)
        if step % 30 == 29:
            with torch.no_grad(), half():
                sung(model.eval(), melodies(64))
            model.train()
    return Happened(30)


@faulty("schedule_ahead", "warning")
def a_warm_up_that_was_skipped(lab: Lab, fault: bool) -> Happened:
    """Sixteen steps of warm-up, counted in batches, against a descent from 2^42 that takes longer."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 16)
    scaler = lab.scaler(model, init_scale=2.0**42)
    for _ in lab.steps(90):
        with half():
            loss = sung(model, melodies(24))
        if turn(lab, scaler, optimizer, loss) or fault:
            schedule.step()
    return Happened()


@faulty("schedule_ahead", "info")
def a_few_steps_ahead(lab: Lab, fault: bool) -> Happened:
    """A cosine over 200 steps moves on over the few attempts that a descent from 2^22 skips."""
    model = Humming()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    scaler = lab.scaler(model, init_scale=2.0**24)
    for _ in lab.steps(100):
        with half():
            loss = sung(model, melodies(24))
        if turn(lab, scaler, optimizer, loss) or fault:
            schedule.step()
    return Happened()


class Saturating(torch.autograd.Function):
    """An accelerator on which float16 ends at 65504: what is beyond becomes that."""

    @staticmethod
    def forward(_: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.nan_to_num(0.0, 65504.0, -65504.0)


class OnAccelerator(nn.Linear):
    """Its products saturate in both directions, and so does the gradient of its float16 weight."""

    saturates = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.saturates:
            return super().forward(x)
        x, weight, bias = (Saturating.apply(each.half()) for each in (x, self.weight, self.bias))
        out: Tensor = Saturating.apply(x @ weight.T + bias)
        return out


@faulty("backend_limit", "warning", within=10)
def an_accelerator_without_infinity(lab: Lab, fault: bool) -> Happened:
    """Gradients end at 65504 there, so that a scale of 2^30 is never found too large."""
    model = nn.Sequential(OnAccelerator(10, 32), nn.SiLU(), OnAccelerator(32, 3))
    for layer in (model[0], model[2]):
        layer.saturates = fault
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**30)
    for _ in lab.steps(60):
        turn(lab, scaler, optimizer, foretold(model))
    return Happened(0)


@faulty("backend_limit", "warning", within=1)
def cuda_asked_for_where_there_is_none(lab: Lab, fault: bool) -> Happened:
    """GradScaler("cuda") on a machine without one turns itself off with a warning that nobody reads."""
    model = dense(16, 32, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, "cuda" if fault else "cpu")
    for _ in lab.steps(40):
        turn(lab, scaler, optimizer, sorted_leaves(model))
    return Happened(0)


@faulty("unscaled_by_new_scale", "info")
def an_engine_that_updates_first(lab: Lab, fault: bool) -> Happened:
    """A loop of the order in which one engine does it: overflow test, update of the scale, then gradients divided by the new one.

    No scaler of torch's is there to be watched; its log is diagnosed, as a trace of that policy.
    """
    model = dense(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    lab.models.append(model)
    scale, since, window = 2.0**8, 0, 25
    columns = ("attempt", "scale", "found_inf", "scale_after", "loss", "grad_norm")
    lab.trace, lab.policy = lab.dir / "engine.csv", "deepspeed" if fault else "torch"
    now, then = weather(64)
    with lab.trace.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        for step in lab.steps(160):
            with half():
                loss = F.mse_loss(model(now).float(), then)
            optimizer.zero_grad()
            (loss * scale).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            overflow = not all(g.isfinite().all() for g in grads)
            since = 0 if overflow else since + 1
            grown = since and since % window == 0
            after = scale / 2 if overflow else scale * 2 if grown else scale
            norm = math.nan
            if not overflow:
                for g in grads:
                    g.div_(after if fault else scale)
                norm = float(torch.stack([g.norm() for g in grads]).norm())
                optimizer.step()
            out.writerow((step, scale, int(overflow), after, lab.note(loss), norm))
            scale = after
    return Happened(24)


@faulty("underflow", "warning", within=10)
def two_optimizers_and_a_scale_of_four(lab: Lab, fault: bool) -> Happened:
    """Body and head have an optimizer each; the loss is divided by the 50,000 notes of an epoch, and the scale stays at 4."""
    model = Composer()
    head = torch.optim.AdamW(model.head.parameters(), 1e-3)
    rest = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("head")], 1e-3)
    scaler = lab.scaler(model, init_scale=4.0 if fault else 2.0**20, growth_interval=10**6)
    for _ in lab.steps(40):
        with half():
            loss = sung(model, melodies(24)) / 50_000
        head.zero_grad()
        rest.zero_grad()
        scaler.scale(loss).backward()
        settle(scaler, head, rest)
        lab.note(loss)
    return Happened(0)
