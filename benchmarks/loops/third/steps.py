"""The training step is at fault: what is called, in which order, on which optimizer, with which gradients."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Adapted,
    Bandit,
    Decoder,
    Forge,
    Listener,
    Mixture,
    advance,
    clicks,
    counting,
    spring,
    stack,
    tones,
)


def spelled(model: nn.Module, batch: int = 8) -> Tensor:
    words = counting(batch)
    with half():
        return F.cross_entropy(model(words)[:, :-1].float().flatten(0, 1), words[:, 1:].flatten())


def predicted(model: nn.Module, batch: int = 32) -> Tensor:
    now, then = spring(batch)
    with half():
        return F.mse_loss(model(now).float().flatten(1), then)


def clicked(model: nn.Module, batch: int = 48) -> Tensor:
    x, click = clicks(batch)
    with half():
        return F.binary_cross_entropy_with_logits(model(x).float()[:, 0], click)


def heard(model: nn.Module, batch: int = 16) -> Tensor:
    x, kind = tones(batch)
    with half():
        return F.cross_entropy(model(x).float(), kind)


@faulty("low_precision_params", "error", within=1, raises=(ValueError,))
def adapters_like_their_base(lab: Lab, fault: bool) -> Happened:
    """A frozen float16 base is fine; the adapters were made with its dtype."""
    model = nn.Sequential(Adapted(12, 32), nn.Tanh(), Adapted(32, 12))
    for name, parameter in model.named_parameters():
        if fault or "base" in name:
            parameter.data = parameter.data.half()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        try:
            advance(lab, scaler, optimizer, predicted(model))
        except ValueError:
            break
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def sharpness_unscaled_twice(lab: Lab, fault: bool) -> Happened:
    """Sharpness-aware minimisation: unscale_ for the ascent, and again for the descent, with no update between."""
    model = stack(10, 32, 1, act=nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        x, click = clicks(48)

        def loss(x: Tensor = x, click: Tensor = click, *, halved: bool = True) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16, enabled=halved):
                return F.binary_cross_entropy_with_logits(model(x).float()[:, 0], click)

        optimizer.zero_grad()
        if fault:
            scaler.scale(loss()).backward()
            scaler.unscale_(optimizer)
            ascent = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
        else:
            ascent = list(torch.autograd.grad(loss(halved=False), list(model.parameters())))
        rise = 0.05 / (nn.utils.get_total_norm(ascent) + 1e-12)
        with torch.no_grad():
            for parameter, up in zip(model.parameters(), ascent, strict=True):
                parameter.add_(up, alpha=float(rise))
        sharp = loss()
        scaler.scale(sharp).backward()
        with torch.no_grad():
            for parameter, up in zip(model.parameters(), ascent, strict=True):
                parameter.sub_(up, alpha=float(rise))
        try:
            scaler.unscale_(optimizer)
        except RuntimeError:
            break
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lab.note(sharp)
    return Happened(0)


@faulty("call_order", "error", within=1, raises=(RuntimeError,))
def update_before_step(lab: Lab, fault: bool) -> Happened:
    """unscale_, clip, update, step: update() forgets that the gradients are unscaled, and step() divides them again."""
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        loss = heard(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        try:
            scaler.unscale_(optimizer)
        except RuntimeError:
            break
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault:
            scaler.update()
            scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("call_order", "error", within=1, per_step=4, raises=(RuntimeError,))
def three_critics_for_one_update(lab: Lab, fault: bool) -> Happened:
    """Three steps of the critic for one of the generator; update() is called once, after the generator's."""
    model = Forge()
    critical = torch.optim.Adam(model.critic.parameters(), 2e-3, betas=(0.5, 0.9))
    making = torch.optim.Adam(model.maker.parameters(), 1e-3, betas=(0.5, 0.9))
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        for _ in range(3):
            critical.zero_grad()
            scaler.scale(model.judged()).backward()
            try:
                scaler.step(critical)
            except RuntimeError:
                return Happened(0)
            if not fault:
                scaler.update()
        advance(lab, scaler, making, model.forged())
    return Happened(0)


@faulty("no_gradients", "error", within=1, raises=(AssertionError,))
def thawed_but_not_quite(lab: Lab, fault: bool) -> Happened:
    """After the head the encoder is to be tuned, but its features are still computed under no_grad."""
    onset = 25 + lab.seed % 5
    model = Listener()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.head.parameters(), 5e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 25):
        if step == onset:
            optimizer = torch.optim.Adam(model.ears.parameters(), 1e-3)
        x, kind = tones(16)
        with half():
            with torch.set_grad_enabled(step >= onset and not fault):
                features = model.ears(x[:, None]).mean(-1)
            loss = F.cross_entropy(model.head(features).float(), kind)
        try:
            advance(lab, scaler, optimizer, loss)
        except AssertionError:
            break
    return Happened(onset)


@faulty("shared_parameter", "error", within=1)
def a_tied_head_in_both(lab: Lab, fault: bool) -> Happened:
    """Matrices go to one optimizer, embedding and head to another, by name; the head is the embedding, and a matrix."""
    model = Decoder(tied=True)
    tied = model.head.weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and (fault or p is not tied)]
    first = torch.optim.SGD(matrices, 0.05, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2 or p is tied], 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        loss = spelled(model)
        first.zero_grad()
        second.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("clip_scaled", "error", within=10)
def policy_clipped_too_early(lab: Lab, fault: bool) -> Happened:
    """A policy gradient with an entropy bonus; the norm is clipped to 0.5 while the gradients are still scaled."""
    model = Bandit()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    scaler = lab.scaler(model)
    for _ in lab.steps(90):
        seen, arm, paid = model.play(64)
        with half():
            policy = torch.distributions.Categorical(logits=model.actor(seen).float())
            value = model.critic(seen).float()[:, 0]
        gain = (paid - value).detach()
        loss = F.mse_loss(value, paid) - (policy.log_prob(arm) * gain).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not fault:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("cleaned_gradients", "error", within=1)
def visitors_without_an_age(lab: Lab, fault: bool) -> Happened:
    """A missing number now and then; the loop that sets such gradients to 0 hides each from the scaler."""
    onset = 26 + lab.seed % 8
    model = stack(10, 32, 32, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 50):
        x, click = clicks(48)
        if fault and step >= onset and (step - onset) % 17 == 0:
            x[5, 7] = float("nan")
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float()[:, 0], click)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(onset)


@faulty("grads_not_cleared", "error", within=3, per_step=2)
def the_critic_is_cleared_twice(lab: Lab, fault: bool) -> Happened:
    """A line copied from the critic's half: before the generator's backward pass the critic's gradients are cleared."""
    model = Forge()
    critical = torch.optim.SGD(model.critic.parameters(), 0.2)
    making = torch.optim.SGD(model.maker.parameters(), 0.2)
    scaler = lab.scaler(model)
    for _ in lab.steps(50):
        advance(lab, scaler, critical, model.judged())
        (critical if fault else making).zero_grad()
        loss = model.forged()
        scaler.scale(loss).backward()
        scaler.step(making)
        scaler.update()
        lab.note(loss)
    return Happened(3)


@faulty("scaler_bypassed", "error", within=10)
def extra_lessons_for_the_critic(lab: Lab, fault: bool) -> Happened:
    """Actor and critic step through the scaler; the critic's two extra rounds scale the loss and step by themselves."""
    model = Bandit()
    acting = torch.optim.Adam(model.actor.parameters(), 2e-3)
    valuing = torch.optim.Adam(model.critic.parameters(), 2e-3)
    scaler = lab.scaler(model)

    def valued(seen: Tensor, paid: Tensor) -> Tensor:
        with half():
            return F.mse_loss(model.critic(seen).float()[:, 0], paid)

    for _ in lab.steps(40):
        seen, arm, paid = model.play(48)
        for _ in range(2):
            if fault:
                valuing.zero_grad()
                scaler.scale(valued(seen, paid)).backward()
                valuing.step()
            else:
                advance(lab, scaler, valuing, valued(seen, paid))
        with half():
            policy = torch.distributions.Categorical(logits=model.actor(seen).float())
        error = valued(seen, paid)
        loss = error - (policy.log_prob(arm) * paid).mean()
        acting.zero_grad()
        valuing.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(acting)
        scaler.step(valuing)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("scaler_bypassed", "error", within=10)
def second_stage_without_scale(lab: Lab, fault: bool) -> Happened:
    """A mixture of experts; the loop of its second stage keeps the scaler's step but calls backward() on the bare loss."""
    onset = 35 + lab.seed % 7
    model = Mixture(12, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 40):
        loss = predicted(model)
        if fault and step >= onset:
            optimizer.zero_grad()
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            lab.note(loss)
        else:
            advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("scaler_bypassed", "error", within=10)
def half_of_a_migration(lab: Lab, fault: bool) -> Happened:
    """The backward line was changed for mixed precision, the line below it was not; RMSprop divides the scale away."""
    model = Mixture(12, 12)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        loss = predicted(model)
        if fault:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            optimizer.step()
            lab.note(loss)
        else:
            advance(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("accumulation", "warning")
def as_many_runs_as_fit(lab: Lab, fault: bool) -> Happened:
    """Windows of one to six micro-batches, as many as a simulator has ready; nobody divides by their number."""
    model = stack(12, 32, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.03)
    scaler = lab.scaler(model)
    lengths = (2, 6, 1, 4, 5, 3)
    for step in lab.steps(40):
        parts = lengths[(step + lab.seed) % 6]
        optimizer.zero_grad()
        for _ in range(parts):
            loss = predicted(model, 64)
            scaler.scale(loss if fault else loss / parts).backward()
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("many_optimizers", "error", "warning", within=20)
def a_rare_penalty_that_never_fits(lab: Lab, fault: bool) -> Happened:
    """Every sixth iteration a second optimizer trains a heavily weighted penalty; the scale doubles every five clean ones."""
    model = nn.ModuleDict({"body": stack(12, 32, 12), "scorer": stack(12, 24, 1)})
    often = torch.optim.Adam(model["body"].parameters(), 1e-3)
    rarely = torch.optim.Adam(model["scorer"].parameters(), 1e-4)
    scaler = lab.scaler(model, init_scale=2.0**9, growth_interval=5 if fault else 2000)
    for step in lab.steps(120):
        loss = predicted(model["body"])
        often.zero_grad()
        scaler.scale(loss).backward()
        if step % 6 == 0:
            rarely.zero_grad()
            now, then = spring(32)
            with half():
                score = model["scorer"](now).float()[:, 0]
            scaler.scale(40 * F.mse_loss(score, then.norm(dim=1))).backward()
            scaler.step(rarely)
        scaler.step(often)
        scaler.update()
        lab.note(loss)
    return Happened(0)
