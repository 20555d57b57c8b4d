"""The loss itself is not finite, or the model, its buffers or its data are at fault."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Dilated,
    Elbo,
    Gated,
    Gru,
    Ledger,
    SkipNet,
    Writer,
    bars,
    mlp,
    sales,
    waves,
    words,
)


def attempt(lab: Lab, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return lab.note(loss)


def first_nonfinite(lab: Lab) -> int | None:
    return next((i for i, x in enumerate(lab.losses) if not math.isfinite(x)), None)


@faulty("forward_overflow", "fatal", within=6, where=("enter",))
def scans_in_raw_counts(lab: Lab, fault: bool) -> Happened:
    """A U-Net that denoises: from an epoch on a second scanner delivers sums of exposures, up to 400,000, in place of 0 to 1."""
    onset = 30 + lab.seed % 7
    model = SkipNet()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 15):
        clean, _ = bars(4)
        scan = (clean + 0.1 * torch.randn_like(clean)).clamp(0, 1)
        if fault and step >= onset:
            scan = 400_000 * scan
        with half():
            loss = F.mse_loss(model(scan).float(), clean)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("forward_overflow", "fatal", within=6, where=("layers.1.feed",))
def checkpoint_from_bfloat16(lab: Lab, fault: bool) -> Happened:
    """Fine-tuning of weights that were trained in bfloat16, whose gated layer has products above 65504."""
    layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(32), "feed": Gated(32, 48)}) for _ in range(2))
    model = nn.ModuleDict({"enter": nn.Linear(24, 32), "layers": layers, "leave": nn.Linear(32, 4)})
    deep: Any = layers[1]
    if fault:
        with torch.no_grad():
            deep["feed"].gate.weight[:4] *= 900
            deep["feed"].up.weight[:4] *= 900
            deep["feed"].down.weight[:, :4] /= 900
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scaler = lab.scaler(model)
    for _ in lab.steps(20):
        past, future = waves(16)
        with half():
            x = model["enter"](past)
            for layer in layers:
                parts: Any = layer
                x = x + parts["feed"](parts["norm"](x))
            loss = F.mse_loss(model["leave"](x).float(), future)
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("forward_overflow", "fatal", within=6, where=("attend",))
def clock_times_in_milliseconds(lab: Lab, fault: bool) -> Happened:
    """Events with time and amount: from a shard on in milliseconds and cents. Scores of attention overflow."""
    onset = 25 + lab.seed % 5
    model = Writer()
    model.clock = nn.Linear(2, 24)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        tokens = words(8)
        times = torch.stack([torch.arange(10.0).expand(8, -1) / 10, torch.randn(8, 10)], 2)
        if fault and step >= onset:
            times = times * 4000
        with half():
            x = model.embed(tokens) + model.clock(times)
            x = x + model.attend(x, x, [torch.ones(10, 10).triu(1)])
            logits = model.head(F.layer_norm(x, (24,)))
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("loss_in_fp16", "fatal", within=6)
def evidence_summed_over_a_batch(lab: Lab, fault: bool) -> Happened:
    """A VAE whose squared errors are added up in float16 over batch and pixels, with larger batches from a step on."""
    onset = 20 + lab.seed % 5
    model = Elbo()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        x = 3 * torch.randn(64 if step < onset else 160, 64)
        with half():
            back, mean, spread = model(x)
            error = back - x.half() if fault else back.float() - x
            rest = (error * error).sum().float() / len(x)
            loss = rest + 0.05 * (mean.square() + spread.exp() - spread - 1).sum() / len(x)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("loss_in_fp16", "fatal", within=6)
def cross_entropy_written_by_hand(lab: Lab, fault: bool) -> Happened:
    """Binary cross entropy of a sigmoid in float16 with an eps of 1e-8, which is 0 there: log(0) once it is sure."""
    model = mlp(6, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(120):
        y = torch.randint(2, (32, 1)).float()
        x = 2 * (2 * y - 1) + 0.3 * torch.randn(32, 6)
        with half():
            logit = model(x)
            if fault:
                p = logit.sigmoid()
                loss = -(y.half() * (p + 1e-8).log() + (1 - y.half()) * (1 - p + 1e-8).log()).mean()
            else:
                loss = F.binary_cross_entropy_with_logits(logit.float(), y)
        attempt(lab, scaler, optimizer, loss)
    return Happened(first_nonfinite(lab))


@faulty("loss_in_fp16", "fatal", within=6)
def pairs_told_apart_in_half(lab: Lab, fault: bool) -> Happened:
    """InfoNCE with the exponentials of similarity / 0.05 added up in float16: e^20 is beyond it."""
    model = mlp(16, 32, 12)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        x = torch.randn(24, 16)
        with half():
            one = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
            two = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
            alike = one @ two.T / 0.05
            if fault:
                loss = -(alike.diagonal().exp() / alike.exp().sum(1)).log().mean()
            else:
                loss = F.cross_entropy(alike.float(), torch.arange(24))
        attempt(lab, scaler, optimizer, loss)
    return Happened(first_nonfinite(lab))


@faulty("mask_constant", "fatal", within=6, where=("attend",))
def prompts_padded_on_the_left(lab: Lab, fault: bool) -> Happened:
    """-1e9 is added for the future and for padding: in float16 the first rows of a left-padded text see nothing."""
    onset = 20 + lab.seed % 6
    model = Writer(fill=-1e9 if fault else -1e4)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        tokens, padded = words(8), torch.zeros(8, 10, dtype=torch.bool)
        if step >= onset:
            padded[::2, :3] = True
            tokens = tokens.masked_fill(padded, 0)
        with half():
            logits = model(tokens, padded)
            loss = F.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0
            )
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


class Neighbours(nn.Module):
    """Graph attention: a node looks at the nodes that it has an edge to."""

    def __init__(self, width: int, far: float) -> None:
        super().__init__()
        self.lift, self.pull, self.far = nn.Linear(width, width), nn.Linear(2 * width, 1), far

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.lift(x)
        pairs = torch.cat([h[:, None].expand(-1, len(h), -1), h[None].expand(len(h), -1, -1)], 2)
        scores = F.leaky_relu(self.pull(pairs)[..., 0]) + (1 - edges).to(h.dtype) * self.far
        return scores.softmax(1) @ h


@faulty("mask_constant", "fatal", within=6, where=("second",))
def a_node_without_an_edge(lab: Lab, fault: bool) -> Happened:
    """Graphs of twelve nodes; from a shard on some node has no neighbour. float32's lowest number hides the others."""
    onset = 30 + lab.seed % 6
    far = torch.finfo(torch.float32).min if fault else -1e4
    model = nn.ModuleDict(
        {"first": nn.Linear(4, 16), "second": Neighbours(16, far), "third": nn.Linear(16, 1)}
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        x = torch.randn(12, 4)
        edges = (torch.rand(12, 12) < 0.4).float().fill_diagonal_(1)
        if step >= onset:
            edges[step % 12] = 0
        with half():
            out = model["third"](F.elu(model["second"](F.elu(model["first"](x)), edges)))
            wanted = edges @ x[:, :1] / edges.sum(1, keepdim=True).clamp_min(1)
            loss = F.mse_loss(out.float(), wanted)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("nonfinite_forward", "fatal", within=2)
def groups_of_one_answer(lab: Lab, fault: bool) -> Happened:
    """Advantages by group, in float32: with one answer a group their spread is 0 / 0. Every module is finite."""
    onset = 25 + lab.seed % 5
    model = mlp(6, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        size = 1 if fault and step >= onset else 4
        state = torch.randn(8, 6).repeat_interleave(size, 0)
        with half():
            chances = model(state).float().log_softmax(1)
        action = torch.multinomial(chances.detach().exp(), 1)
        reward = (action[:, 0] == state[:, :4].argmax(1)).float() + 0.1 * torch.randn(len(state))
        groups = reward.view(8, size)
        gain = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        loss = -(chances.gather(1, action)[:, 0] * gain.flatten()).mean()
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("bad_batch", "warning", within=1)
def a_row_divided_by_zero(lab: Lab, fault: bool) -> Happened:
    """A table of 256 rows in a fixed order, one of whose ratios is infinite; the loop logs which batch it was."""
    model = Ledger()
    model.norm = nn.Identity()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    shop, day, numbers, earned = sales(256)
    bad = 16 * (4 + lab.seed % 9) + 5
    if fault:
        numbers[bad, 3] = math.inf
    for step in lab.steps(80):
        rows = slice(16 * (step % 16), 16 * (step % 16) + 16)
        with half():
            loss = F.l1_loss(model(shop[rows], day[rows], numbers[rows]).float(), earned[rows])
        attempt(lab, scaler, optimizer, loss)
        lab.log(batch_id=step % 16, epoch=step // 16)
    return Happened(bad // 16)


@faulty("bad_batch", "warning", within=1)
def a_recording_shorter_than_its_text(lab: Lab, fault: bool) -> Happened:
    """CTC: one of 24 recordings is too short for its transcript, so its loss is infinite. Nothing names the batch."""
    short = 7 + lab.seed % 11
    model = nn.Sequential(nn.Conv1d(6, 24, 3, padding=1), nn.GELU(), nn.Conv1d(24, 8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    sound, text = torch.randn(24, 4, 6, 20), torch.randint(1, 8, (24, 4, 5))
    for step in lab.steps(96):
        which = step % 24
        lengths = torch.full((4,), 20)
        if fault and which == short:
            lengths[2] = 3
        with half():
            chances = model(sound[which]).float().log_softmax(1).permute(2, 0, 1)
        loss = F.ctc_loss(chances, text[which], lengths, torch.full((4,), 5))
        attempt(lab, scaler, optimizer, loss)
    return Happened(short)


@faulty("buffers_poisoned", "fatal", within=25, where=("norm", "norm.running_mean", "norm.running_var"))
def averages_of_one_mad_batch(lab: Lab, fault: bool) -> Happened:
    """A price in the wrong currency overflows the layer before BatchNorm: the step is skipped, its averages are not."""
    onset = 30 + lab.seed % 6
    model = Ledger()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 40):
        shop, day, numbers, earned = sales(32)
        if fault and step == onset:
            numbers[7, 2] = 5e5
        with half():
            loss = F.mse_loss(model(shop, day, numbers).float(), earned)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("buffers_poisoned", "fatal", within=25, where=("norm", "norm.running_mean", "norm.running_var"))
def a_burnt_out_detector(lab: Lab, fault: bool) -> Happened:
    """A U-Net with BatchNorm: one picture has a pixel of 1e6, which is infinite in float16."""
    onset = 22 + lab.seed % 5
    model = SkipNet(batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 35):
        clean, _ = bars(4)
        dirty = clean + 0.1 * torch.randn_like(clean)
        if fault and step == onset:
            dirty[3, 0, 5, 5] = 1e6
        with half():
            loss = F.mse_loss(model(dirty).float(), clean)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("weights_poisoned", "fatal", within=6)
def a_rate_of_zero_over_zero(lab: Lab, fault: bool) -> Happened:
    """The rate follows the ratio of the last two validation errors, both of which become exactly 0."""
    onset = 30 + lab.seed % 6
    model = mlp(6, 24, 3)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    errors = [0.4, 0.3]
    for step in lab.steps(onset + 14):
        x = torch.randn(32, 6)
        with half():
            loss = F.cross_entropy(model(x).float(), x[:, :3].argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if fault and step == onset:
            errors = [0.0, 0.0]
        optimizer.param_groups[0]["lr"] = 2e-3 * float(torch.tensor(errors[1]) / torch.tensor(errors[0]))
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(onset)


@faulty("weights_poisoned", "fatal", within=6, where=("embed.weight",))
def rows_brought_to_length_one(lab: Lab, fault: bool) -> Happened:
    """From the second epoch on, embeddings are divided by their length after each step; the padding row is zero."""
    onset = 30 + lab.seed % 4
    model = Gru(padding=0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        tokens = words(8)
        tokens[::2, 7:] = 0
        with half():
            logits = model(tokens).float()
            loss = F.cross_entropy(logits[tokens > 0], tokens[tokens > 0] % 5)
        attempt(lab, scaler, optimizer, loss)
        if step >= onset:
            with torch.no_grad():
                length = model.embed.weight.norm(dim=1, keepdim=True)
                model.embed.weight /= length if fault else length.clamp_min(1e-6)
    return Happened(onset)


@faulty("divergence", "fatal", within=5)
def warm_up_without_an_end(lab: Lab, fault: bool) -> Happened:
    """The rate of a network for time series grows by a fifth a step and never stops."""
    model = Dilated()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for step in lab.steps(100):
        grown = step - 40 if fault else min(step - 40, 8)
        optimizer.param_groups[0]["lr"] = 0.01 * 1.2 ** max(0, grown)
        past, future = waves(4)
        with half():
            loss = F.mse_loss(model(past).float(), future)
        scale = scaler.get_scale()
        attempt(lab, scaler, optimizer, loss)
        if fault and step > 40 and scaler.get_scale() < scale:
            return carry_on(lab, scaler, optimizer, model, step)
    return Happened()


def carry_on(lab: Lab, scaler: Any, optimizer: Any, model: nn.Module, step: int) -> Happened:
    """Some attempts more after the first skip."""
    for later in lab.steps(step + 12, step + 1):
        optimizer.param_groups[0]["lr"] = 0.01 * 1.2 ** (later - 40)
        past, future = waves(4)
        with half():
            loss = F.mse_loss(model(past).float(), future)
        attempt(lab, scaler, optimizer, loss)
    return Happened(step)


@faulty("divergence", "fatal", within=5)
def values_without_a_target(lab: Lab, fault: bool) -> Happened:
    """Q-learning on its own next value without a target network, discounted by 1.1 in place of 0.9."""
    model = mlp(4, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    scaler = lab.scaler(model, init_scale=2.0**8)
    first = None
    for step in lab.steps(400):
        state = torch.randn(32, 4)
        after = 0.9 * state + 0.1 * torch.randn(32, 4)
        discount = 1.1 if fault and step >= 50 else 0.9
        with half(), torch.no_grad():
            target = state[:, :1].abs() + discount * model(after).float().max(1, keepdim=True).values
        with half():
            value = model(state).float().gather(1, torch.randint(3, (32, 1)))
            loss = F.mse_loss(value, target)
        scale = scaler.get_scale()
        attempt(lab, scaler, optimizer, loss)
        if first is None and scaler.get_scale() < scale and step > 50:
            first = step
        if first is not None and step > first + 12:
            break
    return Happened(first)


class Broken(torch.autograd.Function):
    """Stands for a kernel that was compiled wrongly for float16."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * math.nan if x.dtype == torch.float16 else x.tanh()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


class Squash(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return Broken.apply(x) if self.broken else x.tanh()


@faulty("device_fault", "fatal", within=6, where=("2.1",))
def a_kernel_that_fails_in_half(lab: Lab, fault: bool) -> Happened:
    """All of an activation is NaN from the first attempt on, though its inputs are small; in float32 it is right."""
    model = nn.Sequential(
        nn.Linear(24, 32), nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 32), Squash(fault)), nn.Linear(32, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(16):
        past, future = waves(4)
        with half():
            loss = F.mse_loss(model(past).float(), future)
        attempt(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("spike", "info")
def one_gust_of_wind(lab: Lab, fault: bool) -> Happened:
    """A network for time series sees one batch of twelve times the size, and recovers."""
    onset = 60 + lab.seed % 10
    model = Dilated()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**8)
    for step in lab.steps(onset + 40):
        past, future = waves(4)
        if fault and step == onset:
            past, future = 12 * past, 12 * future
        with half():
            loss = F.mse_loss(model(past).float(), future)
        attempt(lab, scaler, optimizer, loss)
    return Happened(onset)
