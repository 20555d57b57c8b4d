"""The scale and what depends on it: a learning that runs away, a scaler made anew, a schedule that does not wait."""

import torch
from torch import nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import Composer, Scribe, composed, trained


@faulty("divergence", "fatal", within=5)
def a_value_that_chases_itself(lab: Lab, fault: bool) -> Happened:
    """Values are learned from the net's own values of states that lie farther out; without a slow target they feed on themselves."""
    model = nn.Sequential(nn.Linear(6, 32, bias=False), nn.ReLU(), nn.Linear(32, 1, bias=False))
    target = nn.Sequential(nn.Linear(6, 32, bias=False), nn.ReLU(), nn.Linear(32, 1, bias=False))
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.008)
    scaler = lab.scaler(model, init_scale=2.0**10)
    skipped: list[int] = []
    for step in lab.steps(300):
        state = torch.rand(64, 6)
        paid = state[:, :1] - 0.2
        with half():
            with torch.no_grad():
                later = (model if fault else target)(1.8 * state if fault else 0.8 * state).float()
            value = model(state).float()
        loss = F.mse_loss(value, paid + 0.97 * later)
        if not trained(lab, scaler, optimizer, loss):
            skipped.append(step)
        if step % 50 == 49:
            target.load_state_dict(model.state_dict())
        if len(skipped) > 7:
            break
    return Happened(skipped[0] if skipped else None)


@faulty("scaler_state_lost", "warning", within=1)
def a_scaler_in_every_epoch(lab: Lab, fault: bool) -> Happened:
    """GradScaler is made inside the function that trains one epoch, so each begins with the descent that the first has been through."""
    model = Scribe()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**23)
    for step in lab.steps(120):
        if fault and step and step % 30 == 0:
            scaler = lab.scaler(model, init_scale=2.0**23)
        trained(lab, scaler, optimizer, composed(model, 16))
    return Happened(30)


@faulty("schedule_ahead", "warning")
def warmed_up_before_the_first_step(lab: Lab, fault: bool) -> Happened:
    """A warm-up of 15 steps is counted by batches, and from 2**40 the scale needs more than that before a step is taken."""
    model = Composer()
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 15))
    scaler = lab.scaler(model, init_scale=2.0**40)
    for _ in lab.steps(100):
        taken = trained(lab, scaler, optimizer, composed(model))
        if fault or taken:
            warm_up.step()
    return Happened()
