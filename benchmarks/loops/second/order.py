"""The calling code is at fault: its order, a step past the scaler, gradients handled at the wrong moment."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import Dilated, Experts, Gru, LowRank, Patches, Writer, bars, mlp, ring, waves, words
from .outputs import attempt


def tagged(model: nn.Module, batch: int = 8) -> Tensor:
    tokens = words(batch)
    with half():
        return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten() % 5)


def written(model: nn.Module, batch: int = 6) -> Tensor:
    tokens = words(batch)
    with half():
        return F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def foretold(model: nn.Module, batch: int = 8) -> Tensor:
    past, future = waves(batch)
    with half():
        return F.mse_loss(model(past).float(), future)


class Duel(nn.Module):
    """A generator of points on a ring and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = mlp(4, 32, 2), mlp(2, 32, 1)

    def critical(self) -> Tensor:
        with half():
            fake = self.maker(torch.randn(32, 4)).detach()
            return (
                F.softplus(self.critic(fake).float()).mean()
                + F.softplus(-self.critic(ring(32)).float()).mean()
            )

    def making(self) -> Tensor:
        with half():
            return F.softplus(-self.critic(self.maker(torch.randn(32, 4))).float()).mean()


@faulty("call_order", "error", within=3, per_step=2)
def both_losses_scaled_before_either_step(lab: Lab, fault: bool) -> Happened:
    """A GAN whose two backward passes come first; then step and update of one, step and update of the other."""
    model = Duel()
    one = torch.optim.Adam(model.critic.parameters(), 2e-3, betas=(0.5, 0.9))
    two = torch.optim.Adam(model.maker.parameters(), 1e-3, betas=(0.5, 0.9))
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        one.zero_grad()
        scaler.scale(model.critical()).backward()
        if not fault:
            scaler.step(one)
            scaler.update()
        two.zero_grad()
        scaler.scale(model.making()).backward(inputs=list(model.maker.parameters()))
        if fault:
            scaler.step(one)
            scaler.update()
        scaler.step(two)
        scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def a_second_step_for_good_measure(lab: Lab, fault: bool) -> Happened:
    """From a step on the optimizer is stepped twice: a merge has kept both lines."""
    onset = 22 + lab.seed % 6
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(45):
        optimizer.zero_grad()
        scaler.scale(written(model)).backward()
        scaler.step(optimizer)
        if fault and step >= onset:
            try:
                scaler.step(optimizer)
            except RuntimeError:
                return Happened(onset)
        scaler.update()
    return Happened(onset)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def norms_of_every_micro_batch(lab: Lab, fault: bool) -> Happened:
    """Accumulation over three, and unscale_ and clipping after each of the three."""
    model = Gru()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        optimizer.zero_grad()
        for part in range(3):
            scaler.scale(tagged(model) / 3).backward()
            if part == 2 or fault:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError, AssertionError))
def update_once_an_epoch(lab: Lab, fault: bool) -> Happened:
    """update() has slipped out of the inner loop."""
    model = mlp(6, 24, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(40):
        x = torch.randn(32, 6)
        with half():
            loss = F.cross_entropy(model(x).float(), x[:, :3].argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not fault or step % 10 == 9:
            scaler.update()
    return Happened(0)


@faulty("no_gradients", "error", within=1, raises=(AssertionError,))
def the_average_is_optimized(lab: Lab, fault: bool) -> Happened:
    """The optimizer was given the parameters of the averaged copy."""
    model = Dilated()
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam((average if fault else model).parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        attempt(lab, scaler, optimizer, foretold(model))
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.05)
    return Happened(0)


@faulty("shared_parameter", "error", within=1)
def the_head_in_two_optimizers(lab: Lab, fault: bool) -> Happened:
    """Trunk and head have optimizers of their own, and the trunk's was given all parameters."""
    model = Patches()
    rest = [p for n, p in model.named_parameters() if fault or not n.startswith("head")]
    one, two = torch.optim.AdamW(rest, 1e-3), torch.optim.SGD(model.head.parameters(), 0.05)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        x, y = bars(8)
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("clip_scaled", "error", within=10)
def clipped_as_in_the_old_script(lab: Lab, fault: bool) -> Happened:
    """clip_grad_norm_ to 1 between backward and step, as it stood there before the scaler came."""
    model = Gru()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        loss = tagged(model)
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
def clipped_by_value_from_a_flag_on(lab: Lab, fault: bool) -> Happened:
    """A Q-network whose scaled gradients are clipped to ± 0.5 once a flag is set."""
    onset = 25 + lab.seed % 5
    model = mlp(4, 32, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), 5e-4)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 30):
        state = torch.randn(32, 4)
        with half():
            value = model(state).float().gather(1, torch.randint(3, (32, 1)))
            loss = F.smooth_l1_loss(value, state[:, :1].abs())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step >= onset:
            if not fault:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(onset)


@faulty("cleaned_gradients", "error", within=1)
def hooks_that_hide_an_infinity(lab: Lab, fault: bool) -> Happened:
    """nan_to_num as a hook on every parameter; every twelfth batch or so has an infinite reading."""
    onset = 13 + lab.seed % 5
    model = mlp(6, 24, 1)
    if fault:
        for p in model.parameters():
            p.register_hook(torch.nan_to_num)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 30):
        x = torch.randn(16, 6)
        wanted = x[:, :1] + x[:, 1:2].abs()
        if fault and step >= onset and (step - onset) % 12 == 0:
            x[4, 2] = 1e6
        with half():
            loss = F.mse_loss(model(x).float(), wanted)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("grads_not_cleared", "error", within=3)
def zero_grad_lost_in_a_branch(lab: Lab, fault: bool) -> Happened:
    """From the second stage on nothing clears the gradients of a mixture of experts."""
    onset = 24 + lab.seed % 6
    model = nn.Sequential(nn.Linear(24, 16), Experts(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 40):
        loss = foretold(model, 16)
        if not fault or step < onset:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(onset)


@faulty("grads_not_cleared", "error", within=3)
def cleared_only_after_a_taken_step(lab: Lab, fault: bool) -> Happened:
    """Accumulation over two; zero_grad is left out where the step was skipped, so its infinities stay for good."""
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**21)
    first = None
    for step in lab.steps(40):
        for _ in range(2):
            scaler.scale(written(model) / 2).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        first = step if first is None and skipped else first
        if not (fault and skipped):
            optimizer.zero_grad()
    return Happened(None if first is None else first + 1)


@faulty("scaler_bypassed", "error", within=10)
def the_last_batch_steps_by_itself(lab: Lab, fault: bool) -> Happened:
    """The smaller batch at the end of an epoch has code of its own, which steps the optimizer without the scaler."""
    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(60):
        x, y = bars(3 if step % 12 == 11 else 8)
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        if fault and step % 12 == 11:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            attempt(lab, scaler, optimizer, loss)
    return Happened(10)


@faulty("scaler_bypassed", "error", within=10)
def scaled_by_hand_as_well(lab: Lab, fault: bool) -> Happened:
    """After a refactoring the loss is multiplied by the scale before scale() does it again; Adam hides it."""
    onset = 30 + lab.seed % 6
    model = nn.Sequential(nn.Linear(24, 16), LowRank(16), nn.Linear(16, 4))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**8)
    for step in lab.steps(onset + 30):
        loss = foretold(model, 16)
        attempt(lab, scaler, optimizer, loss * scaler.get_scale() if fault and step >= onset else loss)
    return Happened(onset)


@faulty("scaler_bypassed", "error", within=10)
def the_policy_steps_past_the_scaler(lab: Lab, fault: bool) -> Happened:
    """Actor and critic: the actor's loss is scaled, but its optimizer is stepped directly."""
    actor, critic = mlp(4, 24, 3), mlp(4, 24, 1)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    one, two = torch.optim.Adam(critic.parameters(), 1e-3), torch.optim.Adam(actor.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        state = torch.randn(32, 4)
        with half():
            value, chances = critic(state).float(), actor(state).float().log_softmax(1)
        action = torch.multinomial(chances.detach().exp(), 1)
        reward = (action[:, 0] == state[:, :3].argmax(1)).float()[:, None]
        one.zero_grad()
        two.zero_grad()
        scaler.scale(F.mse_loss(value, reward)).backward()
        scaler.scale(-(chances.gather(1, action) * (reward - value.detach())).mean()).backward()
        scaler.step(one)
        if fault:
            two.step()
        else:
            scaler.step(two)
        scaler.update()
    return Happened(0)


def windows(
    scaler: Any, optimizer: Any, sizes: Iterable[int], loss: Callable[[], Tensor], fault: bool
) -> None:
    for size in sizes:
        optimizer.zero_grad()
        for _ in range(size):
            scaler.scale(loss() / (1 if fault else size)).backward()
        scaler.step(optimizer)
        scaler.update()


@faulty("accumulation", "warning")
def a_sum_over_two_or_six(lab: Lab, fault: bool) -> Happened:
    """Buckets of long texts accumulate six micro-batches, short ones two; nothing is divided."""
    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    scaler = lab.scaler(model, init_scale=2.0**12)
    windows(scaler, optimizer, (2 if s % 3 else 6 for s in lab.steps(45)), lambda: written(model), fault)
    return Happened(0, by=18)


@faulty("accumulation", "warning")
def the_epoch_ends_in_the_middle(lab: Lab, fault: bool) -> Happened:
    """Windows of five, and one of two at the end of each epoch of six; nothing is divided."""
    model = mlp(24, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**12)
    sizes = (2 if s % 6 == 5 else 5 for s in lab.steps(60))
    windows(scaler, optimizer, sizes, lambda: foretold(model, 16), fault)
    return Happened(0, by=36)


@faulty("many_optimizers", "error", "warning", within=30)
def the_embedder_starves_the_policy(lab: Lab, fault: bool) -> Happened:
    """The embedder's spread has an infinite slope at zero, so it always overflows; the policy goes on alone."""
    embedder, policy = mlp(6, 16, 8), mlp(6, 24, 3)
    model = nn.ModuleDict({"embedder": embedder, "policy": policy})
    one, two = torch.optim.Adam(embedder.parameters(), 1e-3), torch.optim.Adam(policy.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(45):
        x = torch.randn(24, 6)
        with half():
            apart = embedder(x).float()
            apart = (apart[:, None] - apart[None]).square().sum(2)
            spread = (apart + (0.0 if fault else 1e-4)).sqrt().mean()
            loss = F.cross_entropy(policy(x).float(), x[:, :3].argmax(1))
        one.zero_grad()
        two.zero_grad()
        scaler.scale((spread - 1).square()).backward()
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("many_optimizers", "error", "warning", within=40)
def a_lazy_penalty_never_applied(lab: Lab, fault: bool) -> Happened:
    """Every eighth step a penalty of great weight has its own optimizer; the scale has grown back until then."""
    model = Duel()
    model.style = mlp(4, 16, 8)
    one = torch.optim.Adam(model.critic.parameters(), 1e-3)
    two = torch.optim.Adam(model.maker.parameters(), 1e-3)
    three = torch.optim.SGD(model.style.parameters(), 1e-6)
    scaler = lab.scaler(model, init_scale=2.0**12, growth_interval=6)
    for step in lab.steps(80):
        one.zero_grad()
        scaler.scale(model.critical()).backward()
        scaler.step(one)
        two.zero_grad()
        scaler.scale(model.making()).backward(inputs=list(model.maker.parameters()))
        scaler.step(two)
        if step % 8 == 7:
            three.zero_grad()
            with half():
                length = model.style(torch.randn(32, 4)).float().square().sum(1)
            scaler.scale((1e4 if fault else 0.01) * (length - 1).square().mean()).backward()
            scaler.step(three)
        scaler.update()
    return Happened(7)


class Signs(torch.optim.Optimizer):
    """Lion; it says that it handles the scale itself, and forgets to look at found_inf."""

    def __init__(self, params: Iterable[Tensor], lr: float, careless: bool) -> None:
        super().__init__(params, {"lr": lr})
        self._step_supports_amp_scaling = careless

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        scale = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad if scale is None else p.grad / scale
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                state["step"] = state.get("step", 0) + 1
                p.sub_((0.9 * mean + 0.1 * grad).sign(), alpha=group["lr"])
                mean.lerp_(grad, 0.01)


@faulty("fused_optimizer", "fatal", within=1)
def lion_that_does_not_look(lab: Lab, fault: bool) -> Happened:
    """A hand-written optimizer that is handed scaled gradients applies the very first overflow."""
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = Signs(model.parameters(), 1e-3, fault)
    scaler = lab.scaler(model, init_scale=2.0**20)
    for _ in lab.steps(30):
        attempt(lab, scaler, optimizer, foretold(model, 16))
    return Happened(0)


class Thrifty(torch.optim.Optimizer):
    """Adam whose state is kept in float16, where its eps of 1e-8 is zero."""

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.float16))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(p, dtype=torch.float16))
                mean.lerp_(p.grad.half(), 0.1)
                square.mul_(0.99).add_(p.grad.half().square(), alpha=0.01)
                p.sub_(mean / (square.sqrt() + group["eps"]), alpha=group["lr"])


@faulty("epsilon_underflow", "fatal", within=1)
def moments_kept_in_half(lab: Lab, fault: bool) -> Happened:
    """Rows of an embedding without a gradient have moments of zero: 0 / (0 + 1e-8) is NaN in float16."""
    model = Gru()
    optimizer = Thrifty(model.parameters(), 1e-3, 1e-8 if fault else 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(20):
        attempt(lab, scaler, optimizer, tagged(model))
    return Happened(0)


@faulty("low_precision_params", "warning", "error", within=0)
def adapters_in_bfloat16(lab: Lab, fault: bool) -> Happened:
    """Low-rank adapters were created in bfloat16, the frozen weights are float32."""
    kind = torch.bfloat16 if fault else torch.float32
    model = nn.ModuleDict(
        {"enter": nn.Linear(24, 16), "adapted": LowRank(16, dtype=kind), "leave": nn.Linear(16, 4)}
    )
    model["enter"].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        past, future = waves(16)
        with half():
            loss = F.mse_loss(model["leave"](model["adapted"](model["enter"](past))).float(), future)
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("low_precision_params", "error", within=0, raises=(ValueError,))
def a_model_loaded_in_half(lab: Lab, fault: bool) -> Happened:
    """The checkpoint was loaded in float16 and is trained as it is."""
    model = mlp(24, 32, 4)
    if fault:
        model = model.half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(20):
        attempt(lab, scaler, optimizer, foretold(model, 16))
    return Happened(0)


@faulty("norm_overflow", "error", within=1)
def a_norm_taken_in_half(lab: Lab, fault: bool) -> Happened:
    """The loop logs the norm of the scaled gradients, taken of one float16 vector: it is infinite, they are not."""
    model = Dilated()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**12)
    onset = None
    for step in lab.steps(30):
        loss = 20 * foretold(model, 8)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        norm = (grads.half() if fault else grads).norm().item()
        onset = step if onset is None and math.isinf(norm) else onset
        lab.log(grad_norm=norm)
        scaler.step(optimizer)
        scaler.update()
    return Happened(onset)
