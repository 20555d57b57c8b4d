"""Healthy loops, among them what is often mistaken for a fault."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .forward import descend
from .lab import Lab, half, healthy
from .models import (
    Causal,
    Dreamer,
    Glyphs,
    Perceptron,
    Reader,
    Tagger,
    Tastes,
    Tower,
    curve,
    pictures,
    sentences,
)
from .text import language, tagging


@healthy
def forgers_with_an_update_each(lab: Lab) -> None:
    """GAN on a ring of Gaussians, step and update per optimizer."""
    maker, judge = Perceptron(4, 32, 2), Perceptron(2, 32, 1)
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    one = torch.optim.Adam(judge.parameters(), 2e-3, betas=(0.5, 0.9))
    two = torch.optim.Adam(maker.parameters(), 1e-3, betas=(0.5, 0.9))
    scaler = lab.scaler(model)
    for _ in lab.steps(75):
        angle = torch.rand(32, 1) * math.tau
        real = torch.cat([angle.cos(), angle.sin()], 1)
        with half():
            fake = maker(torch.randn(32, 4))
            loss = F.softplus(judge(fake.detach()).float()).mean() + F.softplus(-judge(real).float()).mean()
        descend(lab, scaler, one, loss)
        with half():
            loss = F.softplus(-judge(fake).float()).mean()
        descend(lab, scaler, two, loss)


@healthy
def forgers_with_one_update(lab: Lab) -> None:
    """Hinge GAN, two critic steps to one of the generator, one update an iteration."""
    maker, judge = Perceptron(4, 24, 2), Perceptron(2, 24, 1)
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    one, two = torch.optim.RMSprop(judge.parameters(), 1e-3), torch.optim.RMSprop(maker.parameters(), 5e-4)
    scaler = lab.scaler(model, growth_interval=40)
    for step in lab.steps(110):
        real = torch.randn(32, 2) * 0.3 + 1
        with half():
            fake = maker(torch.randn(32, 4))
            loss = F.relu(1 + judge(fake.detach()).float()).mean() + F.relu(1 - judge(real).float()).mean()
        one.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        if step % 2:
            with half():
                loss = -judge(fake).float().mean()
            two.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(two)
        scaler.update()


@healthy
def accumulation_of_four(lab: Lab) -> None:
    """Divided rightly, clipped after unscale_, with a shorter window at the end of each epoch."""
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model, growth_interval=12)
    for step in lab.steps(45):
        size = 2 if step % 9 == 8 else 4
        optimizer.zero_grad()
        for _ in range(size):
            scaler.scale(language(model) / size).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@healthy
def one_cycle(lab: Lab) -> None:
    """OneCycle stepped every iteration, with skips at its start."""
    model = Glyphs()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=121)
    scaler = lab.scaler(model, init_scale=2.0**20)
    for _ in lab.steps(120):
        x, y = pictures(16)
        with half():
            loss = F.cross_entropy(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)
        schedule.step()


@healthy
def margins_all_kept(lab: Lab) -> None:
    """A hinge loss that is exactly 0 once the classes are apart: so are the gradients."""
    model = Perceptron(4, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(150):
        y = torch.randint(2, (32, 1)).float() * 2 - 1
        x = 3 * y + 0.3 * torch.randn(32, 4)
        with half():
            loss = F.relu(1 - y * model(x).float()).mean()
        descend(lab, scaler, optimizer, loss)


@healthy
def minus_infinity_in_a_buffer(lab: Lab) -> None:
    """A causal mask of minus infinities among the buffers."""
    model = Causal()
    optimizer = torch.optim.NAdam(model.parameters(), 3e-3)
    scaler = lab.scaler(model, growth_interval=25)
    for _ in lab.steps(120):
        descend(lab, scaler, optimizer, language(model))


@healthy
def dead_units(lab: Lab) -> None:
    """Most ReLUs of the middle layer never fire."""
    model = Perceptron(8, 32, 32, 1, act=nn.ReLU)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear) and layer.out_features == 32:
                layer.bias[4:] -= 8
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(100):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(model(x).float(), y)
        descend(lab, scaler, optimizer, loss)


@healthy
def rows_never_looked_up(lab: Lab) -> None:
    """An embedding of 4,000 words of which thirty occur, tied to no output."""
    model = Tagger(words=4000)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    scaler = lab.scaler(model)
    for _ in lab.steps(80):
        descend(lab, scaler, optimizer, tagging(model))


@healthy
def from_2_to_the_32(lab: Lab) -> None:
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**32)
    for _ in lab.steps(80):
        descend(lab, scaler, optimizer, language(model))


@healthy
def a_leap_that_recovers(lab: Lab) -> None:
    """Cosine warm restarts: the loss leaps with the rate and comes down again; one batch is mislabelled."""
    model = Glyphs(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 35)
    scaler = lab.scaler(model)
    for step in lab.steps(140):
        x, y = pictures(16)
        with half():
            logits = model(x).float() * (6 if step == 88 else 1)
            loss = F.cross_entropy(logits, (y + 1) % 5 if step == 88 else y)
        descend(lab, scaler, optimizer, loss)
        schedule.step()


@healthy
def gradient_penalty(lab: Lab) -> None:
    """Torch's recipe: scale() of the outputs for the penalty, then of the loss."""
    model = Perceptron(8, 24, 1, act=nn.Softplus)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(70):
        x, y = curve(32)
        optimizer.zero_grad()
        with half():
            loss = F.mse_loss(model(x).float(), y)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        with half():
            penalty = sum(((g * inverse).square().sum() for g in scaled), torch.zeros(())).sqrt()
            loss = loss + 0.01 * penalty
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@healthy
def penalty_on_the_inputs(lab: Lab) -> None:
    """WGAN-GP's penalty: the slope of the critic at points between real and false."""
    model = Perceptron(4, 24, 1, act=nn.Softplus)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.0, 0.9))
    scaler = lab.scaler(model, growth_interval=30)
    for _ in lab.steps(90):
        real, fake = torch.randn(32, 4) + 1, torch.randn(32, 4)
        between = (real + torch.rand(32, 1) * (fake - real)).requires_grad_()
        with half():
            score = model(between).float().sum()
        slope = torch.autograd.grad(scaler.scale(score), between, create_graph=True)[0] / scaler.get_scale()
        with half():
            loss = model(fake).float().mean() - model(real).float().mean()
            loss = loss + 10 * ((slope.square().sum(1) + 1e-12).sqrt() - 1).square().mean()
        descend(lab, scaler, optimizer, loss)


@healthy
def temperature_beside_the_scaler(lab: Lab) -> None:
    """SAC: actor and critic under the scaler, the temperature in float32 with an optimizer of its own."""
    actor, critic = Perceptron(6, 24, 2), Perceptron(8, 24, 1)
    heat = nn.Parameter(torch.zeros(()))
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    one, two = torch.optim.Adam(critic.parameters(), 1e-3), torch.optim.Adam(actor.parameters(), 1e-3)
    three = torch.optim.Adam([heat], 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(70):
        state = torch.randn(32, 6)
        with half():
            action = actor(state).float().tanh() + 0.1 * torch.randn(32, 2)
            value = critic(torch.cat([state, action.detach()], 1)).float()
            loss = F.mse_loss(value, -(state[:, :1] - action[:, :1].detach()).square())
        one.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(one)
        with half():
            loss = (
                -critic(torch.cat([state, action], 1)).float().mean()
                + heat.exp().item() * action.square().mean()
            )
        two.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(two)
        scaler.update()
        three.zero_grad()
        (heat.exp() * (1 - action.detach().square().mean())).backward()
        three.step()


@healthy
def three_tasks(lab: Lab) -> None:
    """A shared trunk, three losses, each with its own backward pass, one step."""
    trunk = Perceptron(8, 32, 16)
    heads = nn.ModuleList(nn.Linear(16, n) for n in (1, 3, 5))
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, amsgrad=True)
    scaler = lab.scaler(model)
    for _ in lab.steps(80):
        x, y = curve(32)
        with half():
            shared = trunk(x)
            losses = [
                F.mse_loss(heads[0](shared).float(), y),
                F.cross_entropy(heads[1](shared).float(), x[:, :3].argmax(1)),
                0.1 * F.cross_entropy(heads[2](shared).float(), x[:, :5].argmin(1)),
            ]
        optimizer.zero_grad()
        for i, loss in enumerate(losses):
            scaler.scale(loss).backward(retain_graph=i < 2)
        scaler.step(optimizer)
        scaler.update()


@healthy
def bfloat16_without_a_scaler(lab: Lab) -> None:
    """The scaler stays in the code, turned off, as every template has it."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, enabled=False)
    for _ in lab.steps(60):
        tokens = sentences(8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        descend(lab, scaler, optimizer, loss)


@healthy
def resumed_with_its_state(lab: Lab) -> None:
    """Model, optimizer and scaler saved at step 50 and loaded by a second job of the same run."""
    state: dict[str, object] = {}
    for start, end in ((0, 50), (50, 110)):
        model = Tastes()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        scaler = lab.scaler(model, init_scale=2.0**24, growth_interval=30)
        if state:
            saved = copy.deepcopy(state)
            model.load_state_dict(saved["model"])  # type: ignore[arg-type]
            optimizer.load_state_dict(saved["optimizer"])  # type: ignore[arg-type]
            scaler.load_state_dict(saved["scaler"])  # type: ignore[arg-type]
        for _ in lab.steps(end, start):
            user, item = torch.randint(50, (64,)), torch.randint(60, (64,))
            with half():
                loss = F.mse_loss(model(user, item).float(), ((user + item) % 5).float() / 4)
            descend(lab, scaler, optimizer, loss)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }
        lab.restart()


@healthy
def rolled_back_in_place(lab: Lab) -> None:
    """A checkpoint of everything is loaded back into the same objects in the middle of the job."""
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**21)
    saved = None
    for step in lab.steps(100):
        descend(lab, scaler, optimizer, language(model))
        if step == 40:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
        if step == 70 and saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            scaler.load_state_dict(saved[2])


@healthy
def long_at_the_ceiling(lab: Lab) -> None:
    """Hundreds of attempts at the ceiling with a skip now and then."""
    model = Perceptron(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    scaler = lab.scaler(model, growth_interval=60)
    for _ in lab.steps(700):
        x, y = curve(32)
        with half():
            loss = F.mse_loss(model(x).float(), y) * (0.5 + torch.rand(()).item())
        descend(lab, scaler, optimizer, loss)


@healthy
def clipped_where_it_should_be(lab: Lab) -> None:
    """A recurrent net clipped hard after unscale_ at every step: the applied norm is pinned, the scaled is not."""
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scaler = lab.scaler(model, growth_interval=35)
    for _ in lab.steps(90):
        loss = tagging(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()


@healthy
def adapters_on_frozen_weights(lab: Lab) -> None:
    """Low-rank adapters: every other parameter is frozen, yet handed to the optimizer."""
    model = Tower(16, [1.0, 1.0, 1.0])
    for p in model.parameters():
        p.requires_grad_(False)
    model.adapter = nn.Linear(16, 2, bias=False)
    model.rise = nn.Linear(2, 16, bias=False)
    nn.init.zeros_(model.rise.weight)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(80):
        x, y = curve(32, 16)
        with half():
            loss = F.mse_loss(model(x + model.rise(model.adapter(x))).float(), y)
        descend(lab, scaler, optimizer, loss)


@healthy
def an_idle_expert(lab: Lab) -> None:
    """Two of four experts get no token for long stretches: their gradients are None."""
    experts, gate = nn.ModuleList(Perceptron(8, 16, 1) for _ in range(4)), nn.Linear(8, 4)
    model = nn.ModuleDict({"experts": experts, "gate": gate})
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(100):
        x, y = curve(32)
        used = [0, 1] if step % 50 < 40 else [2, 3]
        with half():
            weight = gate(x)[:, used].softmax(1)
            out = sum((weight[:, i : i + 1] * experts[e](x) for i, e in enumerate(used)), torch.zeros(()))
            loss = F.mse_loss(out.float(), y)
        descend(lab, scaler, optimizer, loss)


@healthy
def plateau_and_averages(lab: Lab) -> None:
    """ReduceLROnPlateau, an exponential average of the weights, an evaluation under autocast every ten steps."""
    model = Glyphs()
    shadow = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    scaler = lab.scaler(model)
    for step in lab.steps(90):
        x, y = pictures(16)
        with half():
            loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
        descend(lab, scaler, optimizer, loss)
        shadow.update_parameters(model)
        if step % 10 == 9:
            model.eval()
            x, y = pictures(32)
            with torch.inference_mode(), half():
                schedule.step(F.cross_entropy(model(x).float(), y).item())
            model.train()


@healthy
def recomputed_blocks(lab: Lab) -> None:
    """Activation checkpointing: the forward pass of each block runs twice."""
    enter, leave = nn.Linear(8, 16), nn.Linear(16, 1)
    blocks = nn.ModuleList(Perceptron(16, 32, 16) for _ in range(3))
    model = nn.ModuleDict({"enter": enter, "blocks": blocks, "leave": leave})
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(70):
        x, y = curve(32)
        with half():
            h = enter(x)
            for block in blocks:
                h = h + checkpoint(block, h, use_reentrant=False)
            loss = F.mse_loss(leave(h).float(), y)
        descend(lab, scaler, optimizer, loss)


@healthy
def fused_adamw(lab: Lab) -> None:
    """Torch's own fused optimizer, with skips at the start and at the ceiling."""
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, fused=True)
    scaler = lab.scaler(model, init_scale=2.0**22, growth_interval=20)
    for _ in lab.steps(110):
        descend(lab, scaler, optimizer, language(model))


@healthy
def gradients_kept_as_zeros(lab: Lab) -> None:
    """zero_grad(set_to_none=False), clipping by value after unscale_, and dropout."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    optimizer = torch.optim.Adadelta(model.parameters(), 0.5)
    scaler = lab.scaler(model)
    for _ in lab.steps(100):
        x, y = curve(32)
        with half():
            loss = F.huber_loss(model(x).float(), y)
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()


@healthy
def steps_refused_by_the_user(lab: Lab) -> None:
    """A step whose true norm is far above its average is left out by the user, who still calls update()."""
    model = Dreamer()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    usual = None
    for _ in lab.steps(100):
        x = torch.randn(32, 16) * (4 if torch.rand(()) < 0.05 else 1)
        with half():
            back, mean, spread = model(x)
            kl = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
            loss = F.mse_loss(back.float(), x) + 0.01 * kl
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0).item()
        if usual is None or norm < 4 * usual or not math.isfinite(norm):
            scaler.step(optimizer)
        if math.isfinite(norm):
            usual = norm if usual is None else 0.9 * usual + 0.1 * norm
        scaler.update()


@healthy
def a_batch_given_up(lab: Lab) -> None:
    """Now and then memory runs out after backward(): the user drops the batch and goes on."""
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        loss = tagging(model)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step % 17 == 16:
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()


@healthy
def policy_gradient(lab: Lab) -> None:
    """REINFORCE on a bandit with contexts: the loss has either sign and a norm that leaps about."""
    model = Perceptron(6, 24, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), 2e-3)
    scaler = lab.scaler(model, growth_interval=50)
    for _ in lab.steps(140):
        state = torch.randn(8, 6)
        with half():
            chances = model(state).float().log_softmax(1)
        action = torch.multinomial(chances.detach().exp(), 1)
        reward = (action.squeeze(1) == state[:, :4].argmax(1)).float() * 5 + torch.randn(8) * 3
        loss = -(chances.gather(1, action).squeeze(1) * (reward - 1)).mean()
        descend(lab, scaler, optimizer, loss)


@healthy
def longer_texts_every_week(lab: Lab) -> None:
    """A curriculum: sequence length and batch size change, some positions have no gradient at first."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, growth_interval=30)
    for step in lab.steps(120):
        tokens = sentences(24 if step < 40 else 8, length=4 if step < 40 else 8 if step < 80 else 12)
        with half():
            loss = F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        descend(lab, scaler, optimizer, loss)


@healthy
def layers_thawed_one_by_one(lab: Lab) -> None:
    """Fine-tuning that thaws the trunk half way, with a parameter group added to the optimizer."""
    trunk, head = Perceptron(8, 32, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"trunk": trunk, "head": head})
    trunk.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(100):
        if step == 50:
            trunk.requires_grad_(True)
            optimizer.add_param_group({"params": trunk.parameters(), "lr": 0.005})
        x, y = curve(32)
        with half():
            loss = F.mse_loss(head(trunk(x)).float(), y)
        descend(lab, scaler, optimizer, loss)
