"""The scale, its settings and its state, and gradients that no scale serves."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import Dilated, Experts, Gru, Ledger, Noise, Patches, Writer, bars, mlp, ring, sales, waves
from .order import foretold, tagged
from .outputs import attempt


def denoised(model: nn.Module, batch: int = 32) -> Tensor:
    clean, t, noise = ring(batch), torch.rand(batch), torch.randn(batch, 2)
    with half():
        return F.mse_loss(model((1 - t[:, None]) * clean + t[:, None] * noise, t).float(), noise)


@faulty("calibration", "info")
def denoiser_from_two_to_the_thirty(lab: Lab, fault: bool) -> Happened:
    model = Noise()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0 ** (30 if fault else 10))
    for _ in lab.steps(80):
        attempt(lab, scaler, optimizer, denoised(model))
    return Happened(0)


@faulty("growth_probe", "info")
def experts_at_their_ceiling(lab: Lab, fault: bool) -> Happened:
    """The scale grows every 25 steps and is refused now and then."""
    model = nn.Sequential(nn.Linear(24, 16), Experts(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**13, growth_interval=25 if fault else 10_000)
    for _ in lab.steps(300):
        attempt(lab, scaler, optimizer, foretold(model, 16))
    return Happened()


@faulty("underflow", "warning", within=10)
def a_scale_of_one(lab: Lab, fault: bool) -> Happened:
    """A diffusion model whose loss is weighted by 1e-4, with the scale set to 1 and not allowed to grow."""
    model = Noise()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**16, growth_interval=10**6)
    for _ in lab.steps(50):
        attempt(lab, scaler, optimizer, 1e-4 * denoised(model, 64))
    return Happened(0)


@faulty("underflow", "warning", within=10)
def soft_targets_without_their_factor(lab: Lab, fault: bool) -> Happened:
    """Distillation at a temperature of 40 without the square of it, at a small scale that stays."""
    teacher, model = Patches(), Patches()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0 if fault else 2.0**15, growth_interval=10**6)
    for _ in lab.steps(40):
        x, _ = bars(8)
        with half():
            with torch.no_grad():
                wanted = (teacher(x).float() / 40).softmax(1)
            loss = F.kl_div((model(x).float() / 40).log_softmax(1), wanted, reduction="batchmean")
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("narrow_range", "warning", within=50)
def prices_and_preferences(lab: Lab, fault: bool) -> Happened:
    """Two towers: one's loss is a sum in cents, the other's a mean weighted by 3e-5."""
    prices, tastes = mlp(24, 32, 4), mlp(24, 32, 8)
    model = nn.ModuleDict({"prices": prices, "tastes": tastes})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(120):
        past, future = waves(32)
        with half():
            cents = 100 * prices(past).float() - 100 * future
            loss = cents.square().sum() if fault else 1e-5 * cents.square().mean()
            weight = 3e-5 if fault else 1e-1
            loss = loss + weight * F.cross_entropy(tastes(past).float(), (past[:, 0] > 0).long())
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("narrow_range", "warning", within=50)
def a_physical_residual(lab: Lab, fault: bool) -> Happened:
    """A field is fitted with one network, its pressure with another, in units a million apart."""
    pressure, speed = mlp(8, 32, 32, 1), mlp(8, 32, 32, 1)
    model = nn.ModuleDict({"pressure": pressure, "speed": speed})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    great, small = (1e3, 3e-3) if fault else (1.0, 1.0)
    for _ in lab.steps(120):
        x = torch.randn(32, 8)
        with half():
            one = great * (pressure(x).float() - x[:, :1])
            two = small * (speed(x).float() - x[:, 1:2])
            loss = one.square().mean() + two.square().mean()
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("no_updates", "error", "fatal", within=5)
def distance_of_a_point_to_itself(lab: Lab, fault: bool) -> Happened:
    """All pairs of a batch, the pairs of equals among them: the slope of a square root at zero."""
    model = mlp(12, 32, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(26):
        x = torch.randn(24, 12)
        with half():
            seen = model(x).float()
        apart = (seen[:, None] - seen[None]).square().sum(2)
        wanted = (x[:, None, 0] - x[None, :, 0]).abs()
        loss = F.mse_loss((apart + (0.0 if fault else 1e-6)).sqrt(), wanted)
        attempt(lab, scaler, optimizer, loss)
    return Happened(16)


@faulty("scale_floor", "fatal", within=10)
def never_below_128(lab: Lab, fault: bool) -> Happened:
    """Variance regularisation of a feature that is dead: an infinite slope, and a scale that is held at 128."""
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8), nn.Softplus())
    with torch.no_grad():
        model[2].bias[3] -= 40
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = lab.scaler(model)
    for _ in lab.steps(32):
        with half():
            seen = model(torch.randn(32, 12)).float()
        loss = F.relu(1 - (seen.var(0) + (0.0 if fault else 1e-4)).sqrt()).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < 128:
            scaler.update(128.0)
        lab.note(loss)
    return Happened(9)


@faulty("dead_zone", "fatal")
def a_root_of_masked_errors(lab: Lab, fault: bool) -> Happened:
    """The root of errors that are multiplied by a mask: an infinite slope times zero where nothing is to be learned."""
    model = Dilated()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(110):
        past, future = waves(8)
        known = torch.tensor([1.0, 1.0, 1.0, 0.0])
        with half():
            error = (model(past).float() - future) * known
        attempt(lab, scaler, optimizer, (error.abs() + (0.0 if fault else 1e-3)).sqrt().mean())
    return Happened(81, by=144)


@faulty("summed_loss", "info")
def a_sum_over_all_errors(lab: Lab, fault: bool) -> Happened:
    """A forecast in watts whose squared errors are added up, not averaged: the scale settles far below 1."""
    model = nn.Sequential(nn.Linear(24, 32), nn.SiLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(160):
        past, future = waves(64)
        with half():
            error = 300 * (model(past).float() - future)
        attempt(lab, scaler, optimizer, error.square().sum() if fault else 1e-5 * error.square().mean())
    return Happened()


@faulty("useless_scaler", "warning", within=1)
def bfloat16_with_the_scaler_left_in(lab: Lab, fault: bool) -> Happened:
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        tokens = torch.randint(1, 30, (6, 10))
        with torch.autocast("cpu", dtype=torch.bfloat16 if fault else torch.float16):
            loss = F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, :-1].flatten())
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("missing_scaler", "error", within=1)
def the_flag_was_for_bfloat16(lab: Lab, fault: bool) -> Happened:
    """float16 autocast with a scaler that is disabled, left from a bfloat16 configuration."""
    model = Gru()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, enabled=not fault)
    for _ in lab.steps(30):
        attempt(lab, scaler, optimizer, tagged(model))
    return Happened(0)


@faulty("scaler_state_lost", "warning", within=1)
def resumed_without_the_scaler(lab: Lab, fault: bool) -> Happened:
    """The checkpoint holds model and optimizer; the second job begins with a new scaler."""
    state: dict[str, Any] = {}
    for start, end in ((0, 45), (45, 90)):
        model = Dilated()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = lab.scaler(model, init_scale=2.0**22)
        if state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if not fault:
                scaler.load_state_dict(state["scaler"])
        for _ in lab.steps(end, start):
            attempt(lab, scaler, optimizer, foretold(model, 4))
        state = copy.deepcopy(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        )
        lab.restart()
    return Happened(45)


@faulty("scaler_state_lost", "warning", within=1)
def a_new_scaler_every_epoch(lab: Lab, fault: bool) -> Happened:
    """The scaler is made inside the function that trains an epoch."""
    model = Noise()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = None
    for step in lab.steps(90):
        if scaler is None or (fault and step % 30 == 0):
            scaler = lab.scaler(model, init_scale=2.0**20)
        attempt(lab, scaler, optimizer, denoised(model))
    return Happened(30)


@faulty("schedule_ahead", "warning", "info")
def warm_up_over_before_it_began(lab: Lab, fault: bool) -> Happened:
    """Ten steps of warm-up pass while the scale comes down from 2^32 and nothing is trained."""
    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10)
    scaler = lab.scaler(model, init_scale=2.0**32)
    for _ in lab.steps(70):
        x, y = bars(8)
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        scale = scaler.get_scale()
        attempt(lab, scaler, optimizer, loss)
        if fault or scaler.get_scale() >= scale:
            schedule.step()
    return Happened()


@faulty("schedule_ahead", "warning", "info")
def the_cycle_ends_early(lab: Lab, fault: bool) -> Happened:
    """A cosine is stepped with each batch, though many of a long first burst of batches were skipped."""
    model = Noise()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = lab.scaler(model, init_scale=2.0**36)
    for _ in lab.steps(100):
        scale = scaler.get_scale()
        attempt(lab, scaler, optimizer, denoised(model))
        if fault or scaler.get_scale() >= scale:
            schedule.step()
    return Happened()


@faulty("backend_limit", "warning", within=1)
def the_scaler_of_a_missing_gpu(lab: Lab, fault: bool) -> Happened:
    """A scaler for "cuda" on a machine without one turns itself off."""
    model = Ledger()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, "cuda" if fault else "cpu")
    for _ in lab.steps(30):
        shop, day, numbers, earned = sales(32)
        with half():
            loss = F.mse_loss(model(shop, day, numbers).float(), earned)
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


class Saturating(torch.autograd.Function):
    """A matrix product of a device that saturates: what would be infinite is 65504, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).clamp(-65504, 65504).half()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        to_x = (grad.float() @ weight.float()).clamp(-65504, 65504).half()
        to_weight = (grad.float().T @ x.float()).clamp(-65504, 65504).half()
        return to_x, to_weight.float()


class Multiplied(nn.Linear):
    saturates = False

    def forward(self, x: Tensor) -> Tensor:
        if self.saturates:
            return Saturating.apply(x, self.weight) + self.bias
        return super().forward(x)


@faulty("backend_limit", "warning", within=10)
def a_device_that_saturates(lab: Lab, fault: bool) -> Happened:
    """Gradients stop at 65504 and are never infinite, so the scale never falls."""
    model = nn.Sequential(Multiplied(24, 32), nn.SiLU(), Multiplied(32, 4))
    model[0].saturates = model[2].saturates = fault
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = lab.scaler(model, init_scale=2.0**20)
    for _ in lab.steps(40):
        attempt(lab, scaler, optimizer, foretold(model, 16))
    return Happened(0)
