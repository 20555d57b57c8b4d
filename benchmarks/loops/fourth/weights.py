"""Weights, optimizers and their numbers: formats, epsilons, kernels, edits in place, and steps that are never taken."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Adapter,
    Composer,
    Switch,
    average,
    broken_at,
    dense,
    melodies,
    sung,
    turn,
    views,
    weather,
)
from .order import foretold, sorted_leaves


@faulty("low_precision_params", "error", raises=(ValueError,), within=0)
def adapters_cast_with_their_base(lab: Lab, fault: bool) -> Happened:
    """model.half() was meant for the frozen base; it comes after the adapters were put in."""
    model = dense(16, 32, 6).requires_grad_(False)
    if fault:
        model[0] = Adapter(model[0])
        model.half()
    else:
        model.half()
        model[0] = Adapter(model[0])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        turn(lab, scaler, optimizer, sorted_leaves(model))
    return Happened(0)


@faulty("low_precision_params", "warning", within=1)
def experts_loaded_in_bfloat16(lab: Lab, fault: bool) -> Happened:
    """The experts of a mixture come from a bfloat16 checkpoint and are trained on as they are; the router is in float32."""
    model = Switch(10, 3)
    if fault:
        model.experts.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        turn(lab, scaler, optimizer, foretold(model))
    return Happened(0)


class LeanRMSprop(torch.optim.Optimizer):
    """RMSprop that keeps its mean squares in float16 to save memory, with weight decay."""

    def __init__(self, params: list[nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": 1e-4})

    @torch.no_grad()
    def step(self, _: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["square_avg"] = torch.zeros_like(p, dtype=torch.float16)
                mean = state["square_avg"]
                mean.mul_(0.9).add_((0.1 * p.grad.square()).half())
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (p.grad.half() / (mean.sqrt() + group["eps"])).float())


@faulty("epsilon_underflow", "fatal", within=1)
def a_lean_rmsprop_with_weight_decay(lab: Lab, fault: bool) -> Happened:
    """An optimizer of its own with an eps of 1e-8, which is 0 in the float16 of its mean squares; unused notes have a gradient of 0."""
    model = Composer(24)
    optimizer = LeanRMSprop(list(model.parameters()), 1e-3, 1e-8 if fault else 1e-4)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        with half():
            loss = sung(model, melodies(24))
        turn(lab, scaler, optimizer, loss)
    first = broken_at(lab)
    return Happened(first - 1 if first else None)


class SignedMomentum(torch.optim.Optimizer):
    """Steps by the sign of a momentum, in one kernel that unscales by itself and does not look at found_inf."""

    _step_supports_amp_scaling = True

    def __init__(self, params: list[nn.Parameter], lr: float, *, looks: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.looks = looks

    @torch.no_grad()
    def step(self, _: None = None) -> None:  # type: ignore[override]
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.looks and found is not None and float(found):
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad if scale is None else p.grad / scale
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros(())) + 1
                state["momentum"] = state.get("momentum", torch.zeros_like(p)).lerp(grad.clamp(-1, 1), 0.1)
                p.sub_(group["lr"] * state["momentum"].sign())


@faulty("fused_optimizer", "fatal", within=1)
def a_signed_momentum_in_one_kernel(lab: Lab, fault: bool) -> Happened:
    """Infinite gradients of a scale of 2^28 are clamped to 1 and applied by an optimizer that has taken the check upon itself."""
    model = dense(10, 32, 32, 3)
    optimizer = SignedMomentum(list(model.parameters()), 1e-3, looks=not fault)
    scaler = lab.scaler(model, init_scale=2.0**28)
    for _ in lab.steps(50):
        turn(lab, scaler, optimizer, foretold(model))
    return Happened(0)


@faulty("weights_poisoned", "fatal", within=1, where=("0", "0.weight"))
def rows_divided_by_their_length(lab: Lab, fault: bool) -> Happened:
    """Every 20 steps rows are brought to length 1 in place; at step 20 one was just pruned to 0."""
    model = dense(16, 32, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(50):
        if step and step % 20 == 0:
            with torch.no_grad():
                rows = model[0].weight
                rows[rows.norm(dim=1).argmin()] = 0
                length = rows.norm(dim=1, keepdim=True)
                rows.div_(length if fault else length.clamp(min=1e-3))
        turn(lab, scaler, optimizer, sorted_leaves(model))
    return Happened(20)


@faulty("weights_poisoned", "fatal", within=1)
def the_average_is_copied_back_too_early(lab: Lab, fault: bool) -> Happened:
    """Averaged weights replace those in training at step 25; their correction divides by 1 - 0.99 ** 0."""
    model = Composer()
    mean = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for p in mean.parameters():
        p.data.zero_()
    count = 0
    for step in lab.steps(60):
        if step == 25:
            with torch.no_grad():
                for p, averaged in zip(model.parameters(), mean.parameters(), strict=True):
                    p.copy_(averaged / (1 - 0.99**count))
        with half():
            loss = sung(model, melodies(24))
        if turn(lab, scaler, optimizer, loss):
            average(mean, model, 0.99)
            count += 0 if fault and step < 25 else 1
    return Happened(25)


def spreading(model: nn.Module) -> Tensor:
    """Views agree, and each feature keeps a standard deviation of 1."""
    a, b = views(32)
    with half():
        left, right = model(a).float(), model(b).float()
    return F.mse_loss(left, right) + F.relu(1 - left.var(0).sqrt()).mean()


@faulty("no_updates", "error", "fatal", within=5)
def the_spread_of_a_projector_of_zeros(lab: Lab, fault: bool) -> Happened:
    """The last layer begins at 0, so that all features are alike: the slope of the root of their variance is 0 / 0 in each attempt."""
    model = dense(10, 32, 16)
    if fault:
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        turn(lab, scaler, optimizer, spreading(model))
    return Happened(16)


@faulty("nonfinite_forward", "fatal", within=2)
def every_target_is_missing(lab: Lab, fault: bool) -> Happened:
    """The column of targets was joined by a wrong key and is NaN from the first row to the last."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(25):
        now, then = weather(48)
        with half():
            loss = F.mse_loss(model(now).float(), then * torch.nan if fault else then)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


def turned(model: nn.Module, *, safe: bool) -> Tensor:
    """The angle between joints as they are and as they should be; of every other skeleton the last one is padding, along x in both."""
    now, _ = weather(32)
    shown = torch.ones(32, 4, 1)
    shown[::2, 3] = 0
    along = torch.tensor([1.0, 0.0])
    wanted = shown * F.normalize(now[:, :8].view(32, 4, 2), dim=2) + (1 - shown) * along
    with half():
        out = F.normalize(model(now).float().view(32, 4, 2), dim=2)
    alike = (wanted * (shown * out + (1 - shown) * along)).sum(2)
    if safe:
        alike = alike.clamp(-0.999, 0.999)
    return (alike.acos() * shown[..., 0]).sum() / shown.sum()


@faulty("dead_zone", "fatal")
def angles_of_padded_joints(lab: Lab, fault: bool) -> Happened:
    """acos(1) has no slope: NaN behind a mask, in each batch, over a night in which nobody looks."""
    model = dense(10, 32, 8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(110):
        turn(lab, scaler, optimizer, turned(model, safe=not fault))
    return Happened(81, by=144)


@faulty("scale_floor", "fatal", within=10)
def sixteen_at_the_least(lab: Lab, fault: bool) -> Happened:
    """House prices in euro, squared: the slope of the output overflows at 16, below which a wrapper does not let the scale fall."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        now, then = weather(16)
        with half():
            price = model(now).float()
        loss = F.mse_loss(price, (3e5 if fault else 1.0) * (2 + then))
        turn(lab, scaler, optimizer, loss)
        if scaler.get_scale() < 16:
            scaler.update(16.0)
    return Happened(12)
