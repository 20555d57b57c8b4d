"""Healthy loops that look as if they were not."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from loops.lab import Lab, half, healthy

from .zoo import Faces, Forgers, Grid, Letters, advance, moons, portraits, spelled


@healthy
def a_critic_held_by_its_slope(lab: Lab) -> None:
    """A Wasserstein GAN with gradient penalty by torch's recipe, two critic steps a round, an update for each optimizer."""
    model = Forgers()
    one = torch.optim.Adam(model.judge.parameters(), 1e-3, betas=(0.5, 0.9))
    two = torch.optim.Adam(model.forge.parameters(), 1e-3, betas=(0.5, 0.9))
    scaler = lab.scaler(model, init_scale=2.0**12)
    for step in lab.steps(150):
        real = moons(32)
        with half():
            made = model.forge(torch.randn(32, 6)).float()
        if step % 3 < 2:
            blend = torch.rand(32, 1)
            between = (blend * real + (1 - blend) * made.detach()).requires_grad_()
            with half():
                judged = model.judge(between).float()
            scaled = torch.autograd.grad(scaler.scale(judged.sum()), between, create_graph=True)[0]
            slope = scaled / scaler.get_scale()
            with half():
                loss = model.judge(made.detach()).float().mean() - model.judge(real).float().mean()
            loss = loss + 5 * (slope.norm(dim=1) - 1).square().mean()
            advance(lab, scaler, one, loss)
        else:
            with half():
                loss = -model.judge(made).float().mean()
            advance(lab, scaler, two, loss)


@healthy
def a_temperature_in_float32_beside_two_nets(lab: Lab) -> None:
    """Soft actor and critic; the temperature is a float32 number with an optimizer of its own, stepped without the scaler."""
    model = Grid()
    heat = torch.zeros((), requires_grad=True)
    one = torch.optim.Adam([*model.body.parameters(), *model.value.parameters()], 1e-3)
    two = torch.optim.Adam(model.moves.parameters(), 1e-3)
    three = torch.optim.Adam([heat], 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(150):
        board = torch.randn(48, 16)
        with half():
            moves, value = model(board)
        chances = moves.float().log_softmax(1)
        move = torch.multinomial(chances.detach().exp(), 1)
        reward = (move[:, 0] == board[:, :8].argmax(1)).float()
        entropy = -(chances.exp() * chances).sum(1)
        gain = reward + heat.detach().exp() * 0.1 * entropy.detach() - value.float()
        policy = (
            -(chances.gather(1, move)[:, 0] * gain.detach()).mean()
            - 0.1 * heat.detach().exp() * entropy.mean()
        )
        for optimizer in (one, two, three):
            optimizer.zero_grad()
        loss = gain.square().mean() + policy
        scaler.scale(loss).backward()
        for optimizer in (one, two):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
            scaler.step(optimizer)
        scaler.update()
        (heat * (entropy.detach().mean() - 1.0)).backward()
        three.step()
        lab.note(loss)


@healthy
def triplets_that_are_told_apart(lab: Lab) -> None:
    """A triplet loss with a margin: after some epochs it is exactly 0 for most batches, and so is every gradient."""
    model = Faces()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = lab.scaler(model)
    for _ in lab.steps(150):
        labels = torch.randint(6, (6,))
        others = (labels + torch.randint(1, 6, (6,))) % 6
        with half():
            seen = [model(portraits(k, 0.8)).float() for k in (labels, labels, others)]
        one, two, three = (F.normalize(x, dim=1) for x in seen)
        nearer = (one * two).sum(1) - (one * three).sum(1)
        advance(lab, scaler, optimizer, F.relu(0.3 - nearer).mean())


@healthy
def letters_resumed_at_the_ceiling(lab: Lab) -> None:
    """OneCycle, a short growth interval and one batch of noise; the job ends half-way and is resumed with all of its state."""
    state: dict[str, Any] = {}
    for start, end in ((0, 70), (70, 140)):
        model = Letters()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=150)
        scaler = lab.scaler(model, init_scale=2.0**18, growth_interval=25)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "cycle": cycle, "scaler": scaler}
        for name, kept in state.items():
            parts[name].load_state_dict(kept)
        for step in lab.steps(end, start):
            loss = spelled(model)
            if step == 50 + lab.seed % 9:
                noise = torch.randint(28, (8, 12))
                with half():
                    logits = model(noise[:, :-1])
                loss = 3 * F.cross_entropy(logits.float().flatten(0, 1), noise[:, 1:].flatten())
            if advance(lab, scaler, optimizer, loss):
                cycle.step()
        state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        if end < 140:
            lab.restart()
