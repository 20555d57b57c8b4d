"""Healthy loops in number: architectures, optimizers, accumulation, clipping and schedules in many combinations.

Each comes down from a first scale above its ceiling, grows back to it every few steps and is skipped there now and
then, and has one batch of eight times the weight in its middle: a spike of the loss that recovers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lr

from .lab import Lab, Loop, add, half, healthy
from .second.models import (
    Dilated,
    Elbo,
    Experts,
    Gru,
    Ledger,
    LowRank,
    Noise,
    Patches,
    SkipNet,
    Writer,
    bars,
    mlp,
    sales,
    waves,
    words,
)
from .second.order import Signs, foretold, tagged, written
from .second.settings import denoised

Loss = Callable[[nn.Module], Tensor]
Made = Callable[[Iterable[Any]], torch.optim.Optimizer]


def seen(model: nn.Module) -> Tensor:
    x, y = bars(6)
    with half():
        return F.cross_entropy(model(x).float(), y, label_smoothing=0.1)


def cleaned(model: nn.Module) -> Tensor:
    clean, _ = bars(3)
    with half():
        return F.l1_loss(model(clean + 0.2 * torch.randn_like(clean)).float(), clean)


def earned(model: nn.Module) -> Tensor:
    shop, day, numbers, wanted = sales(32)
    with half():
        return F.huber_loss(model(shop, day, numbers).float(), wanted)


def bounded(model: nn.Module) -> Tensor:
    x = torch.randn(32, 4) @ torch.linspace(-1, 1, 256).view(4, 64)
    with half():
        back, mean, spread = model(x)
        return F.mse_loss(back.float(), x) + 0.01 * (mean.square() + spread.exp() - spread - 1).sum(1).mean()


def told_apart(model: nn.Module) -> Tensor:
    x = torch.randn(24, 24)
    with half():
        one, two = (F.normalize(model(x + 0.1 * torch.randn_like(x)).float(), dim=1) for _ in range(2))
    return F.cross_entropy(one @ two.T / 0.2, torch.arange(24))


def heard(model: nn.Module) -> Tensor:
    text = torch.randint(1, 6, (4, 4))
    sound = F.one_hot(text.repeat_interleave(4, 1), 6).float().transpose(1, 2)
    with half():
        chances = model(sound + 0.1 * torch.randn_like(sound)).float().log_softmax(1)
    return F.ctc_loss(chances.permute(2, 0, 1), text, torch.full((4,), 16), torch.full((4,), 4))


def valued(model: nn.Module) -> Tensor:
    state = torch.randn(32, 24)
    with half(), torch.no_grad():
        after = 0.9 * model(0.9 * state).float().max(1, keepdim=True).values
    with half():
        return F.smooth_l1_loss(
            model(state).float().gather(1, torch.randint(4, (32, 1))), state[:, :1].abs() + after
        )


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 16), Experts(), nn.Linear(16, 4))


def adapted() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 16).requires_grad_(False), LowRank(16), nn.Linear(16, 4))


def listener() -> nn.Module:
    return nn.Sequential(nn.Conv1d(6, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 6, 1))


@dataclass(frozen=True)
class Recipe:
    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Made
    clip: float | None = None  # the norm, after unscale_
    micro: int = 1
    schedule: Callable[[Any], Any] | None = None
    first: int = 21  # log2 of the first scale
    interval: int = 14
    steps: int = 56
    to_none: bool = True
    leap: float = 8.0

    def __call__(self, lab: Lab) -> None:
        model = self.model()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        schedule = self.schedule(optimizer) if self.schedule else None
        scaler = lab.scaler(model, init_scale=2.0**self.first, growth_interval=self.interval)
        for step in lab.steps(self.steps):
            optimizer.zero_grad(set_to_none=self.to_none)
            for _ in range(self.micro):
                loss = self.loss(model) * (self.leap if step == self.steps // 2 + lab.seed % 7 else 1.0)
                scaler.scale(loss / self.micro).backward()
            if self.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            scaler.step(optimizer)
            scaler.update()
            if schedule is not None:
                schedule.step()
            lab.note(loss)


adam, adamw, sgd = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
lion = partial(Signs, lr=3e-4, careless=False)
perceptron = partial(mlp, 24, 32, 32, 4)

GRID = {
    "vit_adamw_clip_cosine": Recipe(
        Patches, seen, partial(adamw, lr=1e-3), 1.0, schedule=partial(lr.CosineAnnealingLR, T_max=80)
    ),
    "vit_lion_warmup": Recipe(Patches, seen, lion, schedule=partial(lr.LinearLR, total_iters=20)),
    "vit_sgd_micro3": Recipe(Patches, seen, partial(sgd, lr=0.02, momentum=0.9), micro=3, steps=44),
    "unet_batchnorm_sgd": Recipe(
        partial(SkipNet, batch_norm=True), cleaned, partial(sgd, lr=0.02, momentum=0.9), steps=44
    ),
    "unet_groupnorm_adam_clip": Recipe(SkipNet, cleaned, partial(adam, lr=1e-3), 0.5, steps=44),
    "unet_rmsprop_step": Recipe(
        SkipNet,
        cleaned,
        partial(torch.optim.RMSprop, lr=1e-4),
        schedule=partial(lr.StepLR, step_size=20),
        steps=44,
    ),
    "writer_adamw_micro4_clip": Recipe(Writer, written, partial(adamw, lr=2e-3), 1.0, micro=4, steps=44),
    "writer_fused_adamw": Recipe(Writer, written, partial(adamw, lr=2e-3, fused=True)),
    "writer_foreach_adamw_clip": Recipe(Writer, written, partial(adamw, lr=2e-3, foreach=True), 0.5),
    "writer_adafactor": Recipe(Writer, written, partial(torch.optim.Adafactor, lr=1e-2)),
    "writer_lion_clip": Recipe(Writer, written, lion, 1.0, first=24),
    "gru_adagrad": Recipe(Gru, tagged, partial(torch.optim.Adagrad, lr=0.03), first=24),
    "gru_sgd_clip_hard": Recipe(Gru, tagged, partial(sgd, lr=0.5), 0.1, first=24),
    "gru_nadam_micro2": Recipe(Gru, tagged, partial(torch.optim.NAdam, lr=2e-3), micro=2, first=24, steps=44),
    "dilated_radam": Recipe(Dilated, foretold, partial(torch.optim.RAdam, lr=2e-3), steps=44),
    "dilated_sgd_nesterov_cyclic": Recipe(
        Dilated,
        foretold,
        partial(sgd, lr=0.01, momentum=0.9, nesterov=True),
        1.0,
        schedule=partial(lr.CyclicLR, base_lr=0.002, max_lr=0.02, step_size_up=15),
    ),
    "dilated_adam_onecycle": Recipe(
        Dilated,
        foretold,
        partial(adam, lr=1e-3),
        schedule=partial(lr.OneCycleLR, max_lr=4e-3, total_steps=81),
    ),
    "ledger_batchnorm_adamw": Recipe(Ledger, earned, partial(adamw, lr=3e-3), first=19),
    "ledger_adadelta_zeros": Recipe(Ledger, earned, partial(torch.optim.Adadelta, lr=0.5), to_none=False),
    "ledger_rmsprop_centered_clip": Recipe(
        Ledger, earned, partial(torch.optim.RMSprop, lr=1e-3, centered=True), 1.0
    ),
    "noise_adamw_clip": Recipe(Noise, denoised, partial(adamw, lr=2e-3), 1.0, first=26),
    "noise_fused_adam_restarts": Recipe(
        Noise,
        denoised,
        partial(adam, lr=2e-3, fused=True),
        schedule=partial(lr.CosineAnnealingWarmRestarts, T_0=25),
    ),
    "noise_sgd_micro2_polynomial": Recipe(
        Noise, denoised, partial(sgd, lr=0.05), micro=2, schedule=partial(lr.PolynomialLR, total_iters=80)
    ),
    "elbo_adamax": Recipe(Elbo, bounded, partial(torch.optim.Adamax, lr=3e-3), first=20),
    "elbo_lion_clip": Recipe(Elbo, bounded, lion, 5.0),
    "experts_adam_clip": Recipe(sequence, foretold, partial(adam, lr=2e-3), 1.0, first=25),
    "experts_fused_sgd": Recipe(sequence, foretold, partial(sgd, lr=0.05, fused=True), first=24),
    "adapters_adamw_decay": Recipe(adapted, foretold, partial(adamw, lr=5e-3, weight_decay=0.1), 1.0),
    "pairs_sgd_exponential": Recipe(
        perceptron,
        told_apart,
        partial(sgd, lr=0.1, momentum=0.9),
        schedule=partial(lr.ExponentialLR, gamma=0.99),
        interval=8,  # its gradients become smaller: with 14 some seeds meet no ceiling after the first descent
        steps=64,
    ),
    "pairs_adam_amsgrad_micro2": Recipe(
        perceptron, told_apart, partial(adam, lr=2e-3, amsgrad=True), micro=2
    ),
    "speech_ctc_adamw_clip": Recipe(listener, heard, partial(adamw, lr=5e-3), 5.0),
    "speech_ctc_asgd": Recipe(listener, heard, partial(torch.optim.ASGD, lr=0.05)),
    "values_rmsprop_clip": Recipe(perceptron, valued, partial(torch.optim.RMSprop, lr=5e-4), 10.0),
    "values_adam_foreach_zeros": Recipe(
        perceptron, valued, partial(adam, lr=1e-3, foreach=True), to_none=False
    ),
}
LONG = {
    "long_perceptron_adam": Recipe(
        perceptron, foretold, partial(adam, lr=1e-3), interval=500, steps=20_000, first=16
    ),
    "long_perceptron_sgd_clip": Recipe(
        perceptron, foretold, partial(sgd, lr=0.02, momentum=0.9), 1.0, interval=2000, steps=20_000, first=16
    ),
}


def _register(name: str, recipe: Recipe, set: str) -> None:
    add(Loop(name, lambda lab, _: recipe(lab), None, set=set))


for _name, _recipe in GRID.items():
    _register(_name, _recipe, "grid")
for _name, _recipe in LONG.items():
    _register(_name, _recipe, "long")


@healthy
def bfloat16_watched_by_its_optimizer(lab: Lab) -> None:
    """No scaler at all: the optimizer is watched."""
    _in_bfloat16(lab, Writer(), written_in_bfloat16, partial(adamw, lr=2e-3))


@healthy
def bfloat16_series_watched_by_its_optimizer(lab: Lab) -> None:
    """No scaler at all, clipping, and a batch of eight times the weight."""
    _in_bfloat16(lab, Dilated(), foretold_in_bfloat16, partial(sgd, lr=0.01, momentum=0.9))


def written_in_bfloat16(model: nn.Module) -> Tensor:
    tokens = words(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def foretold_in_bfloat16(model: nn.Module) -> Tensor:
    past, future = waves(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.mse_loss(model(past).float(), future)


def _in_bfloat16(lab: Lab, model: nn.Module, loss_of: Loss, make: Made) -> None:
    optimizer = make(model.parameters())
    lab.watch(optimizer, model)
    for step in lab.steps(56):
        optimizer.zero_grad()
        loss = loss_of(model) * (8.0 if step == 30 else 1.0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lab.log(loss=lab.note(loss))
