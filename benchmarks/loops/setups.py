"""Faults of what stands around the loop: windows, schedules, kernels, dtypes, and the scaler's own state."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .forward import descend
from .lab import Happened, Lab, faulty, half
from .models import Causal, Glyphs, Perceptron, Reader, Tagger, curve, pictures
from .text import language, tagging


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
