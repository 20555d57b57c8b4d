"""Something leaves the range of float16, or never was in it: activations, losses, gradients."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .zoo import (
    Bags,
    Chain,
    Clips,
    DeepFm,
    Faces,
    GraphNet,
    Grid,
    advance,
    averaged,
    dense,
    graphs,
    portraits,
    sessions,
    spectrograms,
)


@faulty("forward_overflow", "fatal", within=6, where=("hops.1",))
def co_occurrences_not_normalised(lab: Lab, fault: bool) -> Happened:
    """A graph network whose second data source has raw counts, some thousand, where shares of 1 stood: hop after hop."""
    onset = 28 + lab.seed % 8
    model = GraphNet()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 40):
        x, edges, wanted = graphs(12)
        weights = 800 * edges if fault and step >= onset else averaged(edges)
        with half():
            loss = F.smooth_l1_loss(model(x, weights).float(), wanted)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("forward_overflow", "fatal", within=6, where=("pairs",))
def a_crawler_among_the_customers(lab: Lab, fault: bool) -> Happened:
    """A factorization machine over clicks: from a day on each batch has a crawler with thousands of them, squared."""
    onset = 33 + lab.seed % 9
    model = DeepFm()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.02)
    scaler = lab.scaler(model, init_scale=2.0**14)
    for step in lab.steps(onset + 40):
        counts, bought = sessions(64)
        if fault and step >= onset:
            counts[step % 64] = torch.randint(1000, 4000, (32,)).float()
        with half():
            logit = model(counts)
        loss = F.binary_cross_entropy_with_logits(logit.float(), bought)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


def partition(emit: Tensor, moves: Tensor) -> Tensor:
    """The logarithm of the sum over all paths, by adding up exponentials. [batch, time, tags] → [batch]"""
    total = emit[:, 0]
    for t in range(1, emit.shape[1]):
        total = ((total[:, :, None] + moves + emit[:, t, None]).exp().sum(1)).log()
    return total.exp().sum(1).log()


def stable_partition(emit: Tensor, moves: Tensor) -> Tensor:
    total = emit[:, 0]
    for t in range(1, emit.shape[1]):
        total = (total[:, :, None] + moves + emit[:, t, None]).logsumexp(1)
    return total.logsumexp(1)


@faulty("loss_in_fp16", "fatal", within=6)
def paths_of_a_random_field_added_in_half(lab: Lab, fault: bool) -> Happened:
    """The partition of a CRF from exponentials in float16, which is infinite above e^11: from a shard on sentences are long."""
    onset = 27 + lab.seed % 7
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**10)
    for step in lab.steps(onset + 40):
        tokens = torch.randint(30, (16, 4 if step < onset else 14))
        tags = (tokens + tokens.roll(1, 1)) % 2 + 2 * (tokens % 2)
        with half():
            emit = model(tokens)
            moves = model.moves.to(emit.dtype)
            total = partition(emit, moves).float() if fault else stable_partition(emit.float(), moves.float())
            gold = emit.float().gather(2, tags[..., None]).sum((1, 2))
            gold = gold + moves.float()[tags[:, :-1], tags[:, 1:]].sum(1)
            loss = (total - gold).mean()
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("mask_constant", "fatal", within=6, where=("pool",))
def a_bag_without_instances(lab: Lab, fault: bool) -> Happened:
    """Attention pooling over bags; −1e9 hides padding, and from a slide on all instances of some bag are filtered out."""
    onset = 26 + lab.seed % 7
    model = Bags(-1e9 if fault else -1e4)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 40):
        x = torch.randn(12, 9, 10)
        count = torch.randint(3, 10, (12,))
        if step >= onset:
            count[step % 12] = 0
        mask = (torch.arange(9) < count[:, None]).float()
        ill = ((x[..., 0] * mask).amax(1) > 1.3).float()
        with half():
            logit = model(x, mask)
        loss = F.binary_cross_entropy_with_logits(logit.float(), ill)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("nonfinite_forward", "fatal", within=2)
def weights_of_a_class_that_is_absent(lab: Lab, fault: bool) -> Happened:
    """Class weights of each batch, in float32, made to add up to 1: from a shard on a class is absent, and n / 0 is infinite."""
    onset = 31 + lab.seed % 6
    model = nn.Sequential(Faces(), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
    scaler = lab.scaler(model, init_scale=2.0**15)
    for step in lab.steps(onset + 40):
        labels = torch.randint(3 if step >= onset else 4, (24,))
        labels[:3] = torch.arange(3)
        labels[3] = 0 if step >= onset else 3
        with half():
            logits = model(portraits(labels, 4.0))
        count = labels.bincount(minlength=4).float()
        weight = len(labels) / (count if fault else count.clamp_min(1))
        loss = F.cross_entropy(logits.float(), labels, weight=weight / weight.sum())
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("bad_batch", "warning", within=1)
def an_atom_without_a_bond(lab: Lab, fault: bool) -> Happened:
    """Graphs normalised once, by degree^-1/2, and read in a fixed order: one of them has a node of degree zero."""
    lone = 6 + lab.seed % 12
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    x, edges, wanted = graphs(22 * 8)
    if fault:
        edges[8 * lone + 3, 5] = 0
        edges[8 * lone + 3, :, 5] = 0
    root = edges.sum(2).rsqrt()
    edges = root[:, :, None] * edges * root[:, None]
    for step in lab.steps(100):
        rows = slice(8 * (step % 22), 8 * (step % 22) + 8)
        with half():
            loss = F.mse_loss(model(x[rows], edges[rows]).float(), wanted[rows])
        advance(lab, scaler, optimizer, loss)
    return Happened(lone)


@faulty("divergence", "fatal", within=5)
def a_probe_with_the_rate_of_another_optimizer(lab: Lab, fault: bool) -> Happened:
    """A linear probe on frozen features: at the second stage the rate is taken from another optimizer's line."""
    frozen = dense(12, 48, 32).requires_grad_(False)
    probe = nn.Linear(32, 3)
    model = nn.ModuleDict({"frozen": frozen, "probe": probe})
    optimizer = torch.optim.SGD(probe.parameters(), 0.02, momentum=0.5)
    scaler = lab.scaler(model, init_scale=2.0**10)
    stage, first = 60, None
    for step in lab.steps(160):
        if step == stage:
            optimizer.param_groups[0]["lr"] = 0.45 if fault else 0.01
        x = torch.randn(32, 12)
        wanted = torch.stack([x[:, 0].abs(), x[:, 1] * x[:, 2], x[:, 3]], 1)
        with half():
            loss = F.mse_loss(probe(F.layer_norm(frozen(x), (32,))).float(), wanted)
        taken = advance(lab, scaler, optimizer, loss)
        if first is None and step > stage and not taken:
            first = step
        if first is not None and step >= first + 12:
            break
    return Happened(first)


@faulty("underflow", "warning", within=10)
def a_mean_of_means_at_a_scale_of_one(lab: Lab, fault: bool) -> Happened:
    """A convolutional autoencoder whose mean is divided by the number of its elements once more; the scale is fixed at 1."""
    model = Clips()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**16, growth_interval=2**31 - 1)
    for _ in lab.steps(80):
        x = spectrograms(16)
        with half():
            loss = F.mse_loss(model(x).float(), x) / x.numel()
        advance(lab, scaler, optimizer, loss)
    return Happened(0)


class Detector(nn.Module):
    """What is in a picture, and where; each on features of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.what = Faces(out=32), Faces(out=32)
        self.box = nn.Sequential(nn.ReLU(), nn.Linear(32, 4))
        self.name = nn.Sequential(nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.box(self.where(x)), self.name(self.what(x))


@faulty("narrow_range", "warning", within=50)
def boxes_in_pixels_beside_rare_names(lab: Lab, fault: bool) -> Happened:
    """Squared errors of boxes in pixels, of one network, beside the names of another, which are weighted by 1e-6."""
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    pixels, weight = (256.0, 1e-6) if fault else (1.0, 1.0)
    for _ in lab.steps(80):
        labels = torch.randint(6, (12,))
        boxes = torch.rand(12, 4) - 0.5 + 0.1 * (labels[:, None] - 2.5)
        with half():
            box, name = model(portraits(labels))
        loss = F.mse_loss(pixels * box.float(), pixels * boxes) + weight * F.cross_entropy(
            name.float(), labels
        )
        advance(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("no_updates", "error", "fatal", within=5)
def entropy_of_moves_that_are_not_allowed(lab: Lab, fault: bool) -> Happened:
    """A policy whose forbidden moves have a chance of exactly 0: where() hides 0 · log 0 from the loss, not from its slope."""
    model = Grid()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(60):
        board = torch.randn(48, 16)
        allowed = torch.rand(48, 8) < 0.7
        allowed[:, 0] = True
        with half():
            moves, value = model(board)
        chances = moves.float().masked_fill(~allowed, -math.inf).softmax(1)
        move = torch.multinomial(chances.detach(), 1)
        reward = (move[:, 0] == board[:, :8].argmax(1)).float()
        gain = reward - value.float()
        if fault:
            surprise = torch.where(chances > 0, chances * chances.log(), torch.zeros(()))
        else:
            surprise = chances * chances.clamp_min(1e-8).log()
        chosen = chances.gather(1, move)[:, 0].clamp_min(1e-8).log()
        loss = -(chosen * gain.detach()).mean() + 0.5 * gain.square().mean() + 0.01 * surprise.sum(1).mean()
        advance(lab, scaler, optimizer, loss)
    return Happened(16)


@faulty("scale_floor", "fatal", within=10)
def distances_of_joints_that_are_hidden(lab: Lab, fault: bool) -> Happened:
    """From a file on joints may be hidden, and a mask sets them to zero: the slope of sqrt(0) at a scale that is held at 64."""
    model = Faces(out=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    onset = 30 + lab.seed % 5
    for step in lab.steps(onset + 50):
        labels = torch.randint(5, (16,))
        joint = torch.stack([labels.float().sin(), labels.float().cos()], 1) + 0.2 * torch.randn(16, 2)
        seen = torch.ones(16, 1)
        if step >= onset:
            seen[:12] = (torch.rand(12, 1) < 0.7).float()
            seen[step % 12] = 0.0
        with half():
            out = model(portraits(labels))
        away = seen * (out.float() - joint)
        distance = (away.square().sum(1) + (0.0 if fault else 1e-6)).sqrt()
        loss = distance.sum() / seen.sum()
        advance(lab, scaler, optimizer, loss)
        if scaler.get_scale() < 64.0:
            scaler.update(64.0)
    return Happened(onset + 10)


def glitch(x: Tensor) -> Tensor:
    """A clip of the batch with one sample that was read as an integer of 32 bits."""
    broken = x.clone()
    broken[2, 0, 7, 3] = 2.0**31
    return broken


@faulty(
    "buffers_poisoned",
    "fatal",
    within=25,
    where=("squeeze.1", "squeeze.1.running_mean", "squeeze.1.running_var"),
)
def one_clip_read_as_integers(lab: Lab, fault: bool) -> Happened:
    """One sample of one clip is 2^31: the convolution overflows, the step is skipped, BatchNorm keeps what it saw."""
    onset = 35 + lab.seed % 10
    model = Clips()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 45):
        x = spectrograms(8)
        with half():
            out = model(glitch(x) if fault and step == onset else x)
        advance(lab, scaler, optimizer, F.l1_loss(out.float(), x))
    return Happened(onset)


@faulty("weights_poisoned", "fatal", within=6)
def an_average_of_no_snapshots(lab: Lab, fault: bool) -> Happened:
    """Weights are replaced by the mean of the snapshots of the last epochs, of which there is none yet: 0 / 0."""
    onset = 29 + lab.seed % 7
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    scaler = lab.scaler(model)
    total: dict[str, Any] = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    count = 0
    for step in lab.steps(onset + 40):
        tokens = torch.randint(30, (16, 6))
        with half():
            tags = model(tokens).float()
        loss = F.cross_entropy(tags.flatten(0, 1), (tokens % 4).flatten())
        loss = loss + 1e-3 * model.moves.square().sum()
        advance(lab, scaler, optimizer, loss)
        if not fault and onset - 6 < step <= onset:
            count += 1
            for name, p in model.named_parameters():
                total[name] += p.detach()
        if step == onset:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(total[name] / count if count else total[name] / torch.tensor(0.0))
    return Happened(onset + 1)
