"""The training script is at fault: the order of its calls, what it optimizes, what it does to gradients."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .zoo import (
    Clips,
    DeepFm,
    Faces,
    Forgers,
    GraphNet,
    Grid,
    Letters,
    advance,
    averaged,
    dense,
    graphs,
    moons,
    played,
    portraits,
    sessions,
    spectrograms,
    spelled,
)


@faulty("call_order", "error", within=3, per_step=2)
def an_update_after_each_half_of_an_autoencoder(lab: Lab, fault: bool) -> Happened:
    """Encoder and decoder have optimizers of their own and one loss: step, update, and only then step of the other, update."""
    model = Clips()
    one = torch.optim.Adam(model.squeeze.parameters(), 1e-3)
    two = torch.optim.Adam(model.expand.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        x = spectrograms(8)
        with half():
            loss = F.mse_loss(model(x).float(), x)
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        if fault:
            scaler.update()
        scaler.step(two)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("no_gradients", "error", within=1, raises=(AssertionError,))
def centers_that_are_detached(lab: Lab, fault: bool) -> Happened:
    """Center loss: the centers have an optimizer of their own, and the loss is taken to `centers.detach()`."""
    model = nn.ModuleDict({"faces": Faces(), "names": nn.Linear(16, 5)})
    centers = nn.Embedding(5, 16)
    model["centers"] = centers
    one = torch.optim.AdamW([*model["faces"].parameters(), *model["names"].parameters()], 1e-3)
    two = torch.optim.SGD(centers.parameters(), 0.5)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        labels = torch.randint(5, (20,))
        with half():
            seen = model["faces"](portraits(labels))
            logits = model["names"](seen)
        table = centers.weight.detach() if fault else centers.weight
        apart = (seen.float() - table[labels]).square().sum(1).mean()
        loss = F.cross_entropy(logits.float(), labels) + 0.05 * apart
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        try:
            scaler.step(two)
        except AssertionError:
            return Happened(0)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("shared_parameter", "error", within=1)
def tied_letters_in_both_optimizers(lab: Lab, fault: bool) -> Happened:
    """The output layer is tied to the table of letters: table and layer were given to an optimizer each."""
    model = Letters()
    model.out.weight = model.table.weight
    rest: list[nn.Module] = [model.place, model.block, model.norm]
    if fault:
        rest.append(model.out)
    one = torch.optim.Adagrad(model.table.parameters(), 0.02)
    two = torch.optim.AdamW([p for m in rest for p in m.parameters()], 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        loss = spelled(model)
        one.zero_grad()
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.step(two)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("clip_scaled", "error", within=10)
def a_policy_clipped_before_unscaling(lab: Lab, fault: bool) -> Happened:
    """Actor and critic with accumulation over two boards, clipped to a norm of 0.5 between backward and step."""
    model = Grid()
    optimizer = torch.optim.Adam(model.parameters(), 7e-4, eps=1e-5)
    scaler = lab.scaler(model)
    for _ in lab.steps(120):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _part in range(2):
            chances, chosen, gain = played(model)
            entropy = -(chances.exp() * chances).sum(1).mean()
            loss = -(chosen * gain.detach()).mean() + 0.5 * gain.square().mean() - 0.01 * entropy
            scaler.scale(loss / 2).backward()
            total += loss.detach() / 2
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        lab.note(total)
    return Happened(0)


@faulty("cleaned_gradients", "error", within=2)
def the_lines_of_a_famous_generator(lab: Lab, fault: bool) -> Happened:
    """A GAN that takes over `nan_to_num(grad, nan=0, posinf=1e5, neginf=-1e5)` before each step: the scale grows for ever."""
    model = Forgers()
    one = torch.optim.Adam(model.judge.parameters(), 2e-3, betas=(0.0, 0.99))
    two = torch.optim.Adam(model.forge.parameters(), 1e-3, betas=(0.0, 0.99))
    scaler = lab.scaler(model, init_scale=2.0**18, growth_interval=20)
    first = None

    def ready(part: nn.Module) -> bool:
        """Clean the gradients of the part if the script does; whether there was anything to clean."""
        grads = [p.grad for p in part.parameters() if p.grad is not None]
        found = not all(bool(g.isfinite().all()) for g in grads)
        if fault:
            for g in grads:
                torch.nan_to_num(g, nan=0, posinf=1e5, neginf=-1e5, out=g)
        return found

    for step in lab.steps(160):
        with half():
            made = model.forge(torch.randn(32, 6))
            real, fake = model.judge(moons(32)), model.judge(made.detach())
        loss = F.softplus(-real.float()).mean() + F.softplus(fake.float()).mean()
        one.zero_grad()
        scaler.scale(loss).backward()
        found = ready(model.judge)
        scaler.step(one)
        with half():
            fake = model.judge(made)
        two.zero_grad()
        scaler.scale(F.softplus(-fake.float()).mean()).backward(inputs=list(model.forge.parameters()))
        found = ready(model.forge) or found
        scaler.step(two)
        scaler.update()
        first = step if first is None and found else first
        lab.note(loss)
    return Happened(first)


@faulty("grads_not_cleared", "error", within=3)
def the_teacher_is_cleared_instead(lab: Lab, fault: bool) -> Happened:
    """Distillation whose loop clears the gradients of the teacher, which has none, and never those of the student."""
    teacher = nn.Sequential(Faces(), nn.ReLU(), nn.Linear(16, 5)).eval()
    student = nn.Sequential(nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(student.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(student, growth_interval=20)
    for _ in lab.steps(120):
        labels = torch.randint(5, (24,))
        x = portraits(labels)
        with half():
            with torch.no_grad():
                wanted = (teacher(x).float() / 2).softmax(1)
            said = student(x).float()
        soft = F.kl_div((said / 2).log_softmax(1), wanted, reduction="batchmean")
        loss = 4 * soft + F.cross_entropy(said, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        (teacher if fault else student).zero_grad()
        lab.note(loss)
    return Happened(1)


@faulty("scaler_bypassed", "error", within=10)
def the_old_step_left_in(lab: Lab, fault: bool) -> Happened:
    """After scaler.step(optimizer) the optimizer.step() of before is still there: two steps are taken with each gradient."""
    model = DeepFm()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(90):
        counts, bought = sessions(64)
        with half():
            logit = model(counts)
        loss = F.binary_cross_entropy_with_logits(logit.float(), bought)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if fault:
            optimizer.step()
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("accumulation", "warning")
def graphs_packed_by_their_size(lab: Lab, fault: bool) -> Happened:
    """Windows of one to six micro-batches, as many as fit a budget of nodes; the losses are added up, not averaged."""
    model = GraphNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.002)
    scaler = lab.scaler(model, init_scale=2.0**11)
    for step in lab.steps(60):
        size = (1, 4, 2, 6, 3)[(step + lab.seed) % 5]
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(size):
            x, edges, wanted = graphs(32)
            with half():
                loss = F.mse_loss(model(x, averaged(edges)).float(), wanted)
            scaler.scale(loss if fault else loss / size).backward()
            total += loss.detach() / size
        scaler.step(optimizer)
        scaler.update()
        lab.note(total)
    return Happened(0, by=15)


@faulty("many_optimizers", "error", "warning")
def the_catalogue_is_never_learned(lab: Lab, fault: bool) -> Happened:
    """Every fifteenth iteration a head is trained on the sum over a catalogue; by then the scale has always grown back."""
    clicks, catalogue = DeepFm(), dense(12, 48, 1)
    model = nn.ModuleDict({"clicks": clicks, "catalogue": catalogue})
    one = torch.optim.Adagrad(clicks.parameters(), 0.02)
    two = torch.optim.SGD(catalogue.parameters(), 1e-5 if fault else 1e-2)
    scaler = lab.scaler(model, init_scale=2.0**13, growth_interval=10)
    items = torch.randn(512, 12)
    price = 20 + 10 * items[:, :1] + 5 * items[:, 1:2].abs()
    for step in lab.steps(150):
        counts, bought = sessions(64)
        with half():
            loss = F.binary_cross_entropy_with_logits(clicks(counts).float(), bought)
        one.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        if step % 15 == 14:
            with half():
                guess = catalogue(items).float()
            error = (
                F.mse_loss(guess, price, reduction="sum") if fault else F.smooth_l1_loss(guess, price) / 50
            )
            two.zero_grad()
            scaler.scale(error).backward()
            scaler.step(two)
        scaler.update()
        lab.note(loss)
    return Happened(14, by=14 + 3 * 15)


class Fused(torch.optim.Optimizer):
    """Momentum "in one kernel", which is handed the scale and found_inf; it looks at them only if both are there."""

    def __init__(self, params: Iterable[Tensor], lr: float, careful: bool) -> None:
        super().__init__(params, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.careful = careful

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if (self.careful or scale is not None) and found is not None and found.item():
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if scale is not None:
                    p.grad.div_(scale)
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                moment = state.setdefault("momentum_buffer", torch.zeros_like(p))
                moment.mul_(0.9).add_(p.grad)
                p.sub_(moment, alpha=group["lr"])


@faulty("fused_optimizer", "fatal", within=1)
def a_kernel_that_forgets_found_inf_after_clipping(lab: Lab, fault: bool) -> Happened:
    """A fused optimizer that heeds found_inf only while it unscales itself: after unscale_ it applies an overflow."""
    model = Letters()
    optimizer = Fused(model.parameters(), 0.02, careful=not fault)
    scaler = lab.scaler(model, init_scale=2.0**24)
    for _ in lab.steps(60):
        loss = spelled(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


class LeanRms(torch.optim.Optimizer):
    """RMSprop that keeps its running squares in a dtype of choice, to save memory."""

    def __init__(self, params: Iterable[Tensor], lr: float, eps: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = self.state[p].setdefault("square_avg", torch.zeros_like(p, dtype=self.dtype))
                square.mul_(0.95).add_(p.grad.to(self.dtype).square(), alpha=0.05)
                p.sub_(p.grad.to(self.dtype) / (square.sqrt() + group["eps"]), alpha=group["lr"])


@faulty("epsilon_underflow", "fatal", within=1)
def running_squares_in_half(lab: Lab, fault: bool) -> Happened:
    """RMSprop with an eps of 1e-8 and its squares in float16: letters that did not occur have 0 / (0 + 0)."""
    model = Letters()
    optimizer = LeanRms(model.parameters(), 5e-4, 1e-8, torch.float16 if fault else torch.float32)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        advance(lab, scaler, optimizer, spelled(model, 4))
    return Happened(0)
