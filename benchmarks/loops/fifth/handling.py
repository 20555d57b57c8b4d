"""Calls in the wrong order, and optimizers, parameters and dtypes that a scaler does not go with."""

import torch
from torch import nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    ActorCritic,
    Composer,
    Coplay,
    Denoiser,
    LowRank,
    Microscope,
    Mixer,
    PixelVAE,
    cells,
    houses,
    melody,
    mlp,
    priced,
    trained,
)


@faulty("low_precision_params", "warning", within=1)
def beside_the_frozen_layers(lab: Lab, fault: bool) -> Happened:
    """What is learned beside the frozen layers was made in bfloat16, which a scaler on the CPU does not refuse."""
    dtype = torch.bfloat16 if fault else torch.float32
    model = nn.Sequential(LowRank(8, 32, dtype), nn.SiLU(), LowRank(32, 1, dtype))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
    scaler = lab.scaler(model, init_scale=2.0**12)
    for _ in lab.steps(100):
        trained(lab, scaler, optimizer, priced(model))
    return Happened(0)


@faulty("call_order", "error", within=1)
def off_by_one_in_the_window(lab: Lab, fault: bool) -> Happened:
    """Windows of four: unscale_ and clipping are asked for at i % 4, the step at (i + 1) % 4, so three micro-batches follow unscaled ones."""
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**11)
    optimizer.zero_grad()
    for _ in lab.steps(70):
        for i in range(4):
            clean, _ = cells(8)
            with half():
                guess = model(clean + 0.1 * torch.randn_like(clean))
            loss = F.mse_loss(guess.float(), clean)
            scaler.scale(loss / 4).backward()
            if (i if fault else i + 1) % 4 == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                lab.note(loss)
    return Happened(0)


@faulty("call_order", "error", within=1, per_step=2)
def an_update_between_encoder_and_decoder(lab: Lab, fault: bool) -> Happened:
    """One loss, an optimizer for each half; a helper that steps and updates is called for both, the second by a scale that is newer than the loss."""
    model = PixelVAE()
    encoding = torch.optim.Adam(model.encoder.parameters(), 2e-3)
    decoding = torch.optim.Adam(model.decoder.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**12, growth_interval=45)
    for _ in lab.steps(80):
        x = F.avg_pool2d(cells(64)[0], 2).flatten(1)
        with half():
            picture, divergence = model(x)
        loss = F.mse_loss(picture, x) + 1e-3 * divergence.mean()
        encoding.zero_grad()
        decoding.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(encoding)
        if fault:
            scaler.update()
        scaler.step(decoding)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("no_gradients", "error", within=1, raises=(AssertionError,))
def a_new_head_for_old_hands(lab: Lab, fault: bool) -> Happened:
    """For the second task the classifier's head is replaced; its optimizer still holds the old one."""
    onset = 36 + lab.seed % 7
    model = Microscope()
    body = torch.optim.SGD(
        [p for n, p in model.named_parameters() if not n.startswith("fc")], 0.02, momentum=0.9
    )
    head = torch.optim.Adam(model.fc.parameters(), 5e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 30):
        if step == onset:
            model.fc = nn.Linear(24, 2)
            if not fault:
                head = torch.optim.Adam(model.fc.parameters(), 5e-3)
        x, kind = cells(32)
        with half():
            logits = model(x)
        loss = F.cross_entropy(logits.float(), kind if step < onset else kind // 2)
        body.zero_grad()
        head.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(body)
        try:
            scaler.step(head)
        except AssertionError:
            break
        scaler.update()
        lab.note(loss)
    return Happened(onset)


@faulty("shared_parameter", "error", within=1)
def a_trunk_with_two_masters(lab: Lab, fault: bool) -> Happened:
    """Actor and critic have an optimizer each, and both were given the trunk that they share."""
    model = ActorCritic()
    trunk = list(model.trunk.parameters())
    acting = torch.optim.Adam([*trunk, *model.policy.parameters()], 3e-3)
    valuing = torch.optim.Adam([*(trunk if fault else []), *model.value.parameters()], 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(80):
        policy, value = model.losses()
        loss = policy + value
        acting.zero_grad()
        valuing.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(acting)
        scaler.step(valuing)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("scaler_bypassed", "error", within=10)
def the_step_of_the_old_script(lab: Lab, fault: bool) -> Happened:
    """scale, unscale_, clip, update are all there, but between them stands optimizer.step() as it did in float32."""
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**11)
    for _ in lab.steps(70):
        x, kind = cells(24)
        with half():
            logits = model(x)
        loss = F.cross_entropy(logits.float(), kind)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault:
            optimizer.step()
        else:
            scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("many_optimizers", "error", "warning", within=32)
def every_tenth_time_in_vain(lab: Lab, fault: bool) -> Happened:
    """A calibration head is trained every tenth iteration at a weight of 3000; the scale doubles after eight clean ones, just in time to fail it."""
    main, calibration = mlp(8, 32, 1), mlp(8, 24, 1)
    model = nn.ModuleDict({"main": main, "calibration": calibration})
    often = torch.optim.AdamW(main.parameters(), 2e-3)
    rarely = torch.optim.AdamW(calibration.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**9, growth_interval=8 if fault else 2000)
    for step in lab.steps(150):
        loss = priced(main)
        often.zero_grad()
        scaler.scale(loss).backward()
        if step % 10 == 0:
            x, price = houses(64)
            with half():
                sure = calibration(x)
            rarely.zero_grad()
            scaler.scale((3000 if fault else 3) * F.mse_loss(sure.float(), price.abs() + 1)).backward()
            scaler.step(rarely)
        scaler.step(often)
        scaler.update()
        lab.note(loss)
    return Happened(0)


@faulty("useless_scaler", "warning", within=1)
def the_default_of_a_cpu(lab: Lab, fault: bool) -> Happened:
    """torch.autocast("cpu") without a dtype is bfloat16, which no scaler is needed for."""
    model = Composer()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(70):
        tune = melody(24)
        with torch.autocast("cpu") if fault else half():
            logits = model(tune)[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), tune[:, 1:].flatten())
        trained(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("missing_scaler", "error", within=1)
def switched_off_by_a_flag(lab: Lab, fault: bool) -> Happened:
    """The scaler has a switch of its own in the configuration, left at off; autocast has another, at float16."""
    model = Coplay()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    scaler = lab.scaler(model, enabled=not fault)
    for _ in lab.steps(80):
        listener, song = torch.randint(50, (256,)), torch.randint(60, (256,))
        with half():
            score = model(listener, song)
        loss = F.binary_cross_entropy_with_logits(score.float(), ((listener + song) % 3 == 0).float())
        trained(lab, scaler, optimizer, loss)
    return Happened(0)
