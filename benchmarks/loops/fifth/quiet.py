"""Nothing is wrong here, though each has something that looks as if it were."""

import torch
from torch import nn
from torch.nn import functional as F

from loops.lab import Lab, half, healthy

from .models import Ring, Scribe, composed, houses, mlp, trained


@healthy
def a_ring_by_hinges(lab: Lab) -> None:
    """A GAN with step and update for each optimizer; the hinges are often at exactly 0, and the generator's loss rises at times."""
    model = Ring()
    telling = torch.optim.Adam(model.discriminator.parameters(), 2e-3, betas=(0.0, 0.9))
    making = torch.optim.Adam(model.generator.parameters(), 1e-3, betas=(0.0, 0.9))
    scaler = lab.scaler(model)
    for _ in lab.steps(130):
        trained(lab, scaler, telling, model.told())
        trained(lab, scaler, making, model.fooled())


@healthy
def a_masked_scribe_from_two_to_the_32(lab: Lab) -> None:
    """A causal mask of minus infinities in a buffer, windows of two, and a descent from 2**32; OneCycle goes by the steps taken."""
    model = Scribe()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=150)
    scaler = lab.scaler(model, init_scale=2.0**32)
    for _ in lab.steps(110):
        optimizer.zero_grad()
        for _ in range(2):
            loss = composed(model, 12)
            scaler.scale(loss / 2).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
        if scaler.get_scale() >= scale:
            cycle.step()


@healthy
def a_temperature_of_its_own(lab: Lab) -> None:
    """Soft actor-critic on a bandit: two losses through the scaler, and a float32 temperature whose optimizer steps by itself."""
    critic, actor = mlp(10, 32, 1), mlp(8, 32, 4)
    model = nn.ModuleDict({"critic": critic, "actor": actor})
    temperature = torch.zeros((), requires_grad=True)
    valuing = torch.optim.Adam(critic.parameters(), 3e-3)
    acting = torch.optim.Adam(actor.parameters(), 1e-3)
    tempering = torch.optim.Adam([temperature], 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(140):
        seen, tried = torch.randn(96, 8), 2 * torch.rand(96, 2) - 1
        paid = (seen[:, :2] * tried).sum(1) - tried.square().sum(1)
        with half():
            worth = critic(torch.cat([seen, tried], 1))
        trained(lab, scaler, valuing, F.mse_loss(worth.float()[:, 0], paid))
        with half():
            mean, spread = actor(seen).float().chunk(2, 1)
            play = torch.distributions.Normal(mean, spread.clamp(-3, 1).exp())
            raw = play.rsample()
            move = raw.tanh()
            chance = (play.log_prob(raw) - (1 - move.square() + 1e-5).log()).sum(1)
            worth = critic(torch.cat([seen, move], 1)).float()[:, 0]
        trained(lab, scaler, acting, (temperature.detach().exp() * chance - worth).mean())
        tempering.zero_grad()
        (-temperature.exp() * (chance.detach() - 2).mean()).backward()
        tempering.step()


@healthy
def a_smooth_price(lab: Lab) -> None:
    """A penalty on the gradient by the input, as the manual does it: scale() twice an update, and the inverse scale by hand."""
    model = mlp(8, 48, 1, deep=2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model, growth_interval=60)
    for _ in lab.steps(200):
        x, price = houses(64)
        x.requires_grad_()
        with half():
            guess = model(x)
            loss = F.mse_loss(guess.float(), price)
        (slope,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
        slope = slope / scaler.get_scale()
        with half():
            loss = loss + 20 * slope.square().sum()
        trained(lab, scaler, optimizer, loss)
