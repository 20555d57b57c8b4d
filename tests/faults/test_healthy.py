"""Healthy, and often mistaken: nothing above info may be said of any of these."""

import torch
from loops import Transformer, above_info, features, half, mlp, recorded, regression, train
from torch import nn
from torch.nn import functional as F


def test_two_networks_that_fight(tmp_path):
    generator, critic = mlp(out=8), mlp()
    with recorded(tmp_path) as make:
        scaler = make(growth_interval=10)
        optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in (critic, generator)]
        for step in range(40):
            for optimizer, sign in zip(optimizers, (1.0, -1.0), strict=True):
                optimizer.zero_grad()
                with half():
                    fake = critic(generator(features(step))).float().mean()
                    loss = (
                        sign
                        * (fake - critic(features(step + 1000) + 2).float().mean())
                        * (1 + 9 * (sign > 0))
                    )
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert above_info(tmp_path) == []


def test_two_networks_with_a_scaler_each(tmp_path):
    """The generator's loss adds to the critic's gradients, which are cleared only before its own next one."""
    generator, critic = mlp(out=8), mlp()
    with recorded(tmp_path) as make:
        scalers = [make(model=net) for net in (critic, generator)]
        optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (critic, generator)]
        for step in range(20):
            for scaler, optimizer, sign in zip(scalers, optimizers, (1.0, -1.0), strict=True):
                optimizer.zero_grad()
                with half():
                    loss = sign * critic(generator(features(step))).float().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert above_info(tmp_path) == []


def test_accumulation(tmp_path):
    model = Transformer()
    with recorded(tmp_path) as make:
        scaler, optimizer = make(model=model), torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(10):
            optimizer.zero_grad()
            for part in range(4):
                with half():
                    loss = model.loss(4 * step + part) / 4
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert above_info(tmp_path) == []


def test_one_cycle_from_2_32(tmp_path):
    model = mlp()
    with recorded(tmp_path) as make:
        scaler, optimizer = make(model=model, init_scale=2.0**32), torch.optim.SGD(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=61)
        optimizer.step()  # the scheduler wants one before its own; there is nothing to step yet
        for step in range(60):
            train(model, scaler, lambda _, step=step: regression(model, step), steps=1, optimizer=optimizer)
            schedule.step()
    assert above_info(tmp_path) == []


def test_gradient_penalty(tmp_path):
    model = mlp()
    with recorded(tmp_path) as make:
        scaler, optimizer = make(model=model, growth_interval=5), torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(20):
            optimizer.zero_grad()
            with half():
                loss = regression(model, step)
            grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            inverse = 1.0 / scaler.get_scale()
            penalty = sum((g * inverse).float().square().sum() for g in grads)
            scaler.scale(loss + 0.01 * penalty).backward()
            scaler.step(optimizer)
            scaler.update()
    assert above_info(tmp_path) == []


def test_a_second_optimizer_outside_the_scaler(tmp_path):
    model, temperature = mlp(), nn.Parameter(torch.zeros(()))
    with recorded(tmp_path) as make:
        scaler, optimizer = make(model=model), torch.optim.SGD(model.parameters(), 1e-3)
        outside = torch.optim.Adam([temperature], 1e-2)
        for step in range(20):
            train(model, scaler, lambda _, step=step: regression(model, step), steps=1, optimizer=optimizer)
            outside.zero_grad()
            (temperature.exp() * 0.5).backward()
            outside.step()
    assert above_info(tmp_path) == []


def test_a_hinge_loss_that_is_exactly_0(tmp_path):
    model = mlp()

    def hinge(step):
        x, margin = features(step), 0.5 if step <= 5 else -1e3
        return F.relu(margin - model(x).float() * x.sum(-1, keepdim=True).sign()).mean()

    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model), hinge, steps=40)
    assert above_info(tmp_path) == []


def test_a_loss_spike_that_recovers(tmp_path):
    model = mlp()
    with recorded(tmp_path) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        burst = {25: 300.0, 26: 60.0, 27: 8.0}
        train(
            model,
            scaler(model=model, init_scale=2.0**14),
            lambda step: regression(model, step) * burst.get(step, 1.0),
            steps=60,
            optimizer=optimizer,
        )
    assert above_info(tmp_path) == []


def test_batch_norm_and_convolution(tmp_path):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )

    def loss_at(step):
        x = features(step, rows=64).view(8, 1, 8, 8)
        return F.cross_entropy(model(x).float(), (x.sum((1, 2, 3)) > 0).long())

    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model, growth_interval=8), loss_at, clip=1.0)
    assert above_info(tmp_path) == []


def test_recurrence(tmp_path):
    cell, head = nn.GRUCell(8, 16), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])

    def loss_at(step):
        state, x = torch.zeros(8, 16), features(step, rows=80).view(10, 8, 8)
        for now in x:
            state = cell(now, state)
        return F.mse_loss(head(state).float(), x.mean((0, 2)).unsqueeze(-1))

    with recorded(tmp_path) as scaler:
        train(model, scaler(), loss_at, steps=20)
    assert above_info(tmp_path) == []


def test_masks_of_minus_infinity_and_unused_rows(tmp_path):
    model = Transformer()
    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model, growth_interval=10), model.loss, steps=40, clip=1.0)
    assert above_info(tmp_path) == []
