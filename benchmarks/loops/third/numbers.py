"""A number leaves float16 in the forward pass, in the loss, in the data, the buffers or the weights."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Codebook,
    Decoder,
    Hopfield,
    Listener,
    Outliner,
    Recurrence,
    SumOfNeighbours,
    advance,
    clicks,
    counting,
    discs,
    first_nonfinite,
    payments,
    spring,
    stack,
    tones,
)


@faulty("forward_overflow", "fatal", within=6, where=("recall",))
def colder_and_colder(lab: Lab, fault: bool) -> Happened:
    """A Hopfield layer is cooled: its inverse temperature doubles every sixth step, and nobody has said where to stop."""
    model = nn.ModuleDict(
        {"enter": nn.Linear(12, 32), "recall": Hopfield(32, 24), "leave": nn.Linear(32, 12)}
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    recall = model["recall"]
    assert isinstance(recall, Hopfield)
    for step in lab.steps(110 + lab.seed % 4):
        now, then = spring(24)
        recall.beta = 2.0 ** (step // 6 if fault else min(step // 6, 3))
        with half():
            loss = F.mse_loss(model["leave"](recall(model["enter"](now))).float(), then)
        advance(lab, scaler, optimizer, loss)
    return Happened(first_nonfinite(lab))


@faulty("forward_overflow", "fatal", within=6, where=("layers.0",))
def an_account_that_paid_everybody(lab: Lab, fault: bool) -> Happened:
    """Amounts are added up over neighbours; a new extract of the accounts holds one that is joined to all others."""
    onset = 28 + lab.seed % 6
    layers = [SumOfNeighbours(4, 24, mean=not fault), SumOfNeighbours(24, 24, mean=True)]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(24, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 16):
        nodes, edges, large = payments(240, hub=step >= onset)
        with half():
            for layer in layers:
                nodes = layer(nodes, edges)
            loss = F.cross_entropy(model["head"](nodes).float(), large)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("nonfinite_forward", "fatal", within=2, accept=("forward_overflow",))
def a_curriculum_of_lengths(lab: Lab, fault: bool) -> Happened:
    """A linear recurrence whose states grow by a quarter a step, on longer sequences from an epoch on; the scaler was not given the model."""
    onset = 22 + lab.seed % 6
    model = Recurrence(24, 1.25 if fault else 0.95)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, named=False)
    for step in lab.steps(onset + 10):
        x, kind = tones(16, 12 if step < onset else 60)
        with half():
            loss = F.cross_entropy(model(x).float(), kind)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("loss_in_fp16", "fatal", within=6)
def dice_of_larger_crops(lab: Lab, fault: bool) -> Happened:
    """The Dice loss adds up all pixels of a batch in float16; progressive resizing makes them too many."""
    onset = 36 + lab.seed % 5
    model = Outliner()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 10):
        x, inside = discs(4, 40) if step < onset else discs(6, 112)
        with half():
            logits = model(x)
            sure = logits.sigmoid() if fault else logits.float().sigmoid()
            common = (sure * inside.to(sure.dtype)).sum()
            dice = 1 - 2 * common / (sure.sum() + inside.to(sure.dtype).sum() + 1)
            loss = F.binary_cross_entropy_with_logits(logits.float(), inside) + dice
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("loss_in_fp16", "fatal", within=6)
def visits_beyond_sixty_thousand(lab: Lab, fault: bool) -> Happened:
    """Counts of visits are fitted by a Poisson likelihood whose rate is an exponential in float16."""
    model = stack(4, 32, 1, act=nn.SiLU)
    last = model[-1]
    assert isinstance(last, nn.Linear)
    nn.init.constant_(last.bias, math.log(20_000))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(70):
        page = torch.rand(64, 4)
        visits = torch.poisson(20_000 + 180_000 * page[:, :1] * page[:, 1:2])
        with half():
            logarithm = model(page)
            rate = logarithm.exp() if fault else logarithm.float().exp()
            loss = ((rate - visits * logarithm.float()) / 20_000).mean()
        advance(lab, scaler, optimizer, loss)
    return Happened(first_nonfinite(lab))


@faulty("mask_constant", "fatal", within=6, where=("layers.0.attention", "layers.0"))
def packed_documents(lab: Lab, fault: bool) -> Happened:
    """Documents are packed, each word sees its own, and padding sees nothing: rows of minus infinity once a pack is not full."""
    onset = 24 + lab.seed % 7
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        words = torch.cat([counting(8, 7), counting(8, 9)], 1)
        document = torch.tensor([1] * 7 + [2] * 9).expand(8, -1).clone()
        if step >= onset:
            words[2:5, 12:], document[2:5, 12:] = 0, 0
        seen = (document[:, :, None] == document[:, None]).tril()
        if fault:
            seen &= document[:, None] != 0
        bias = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
        with half():
            guess = model(words, bias)[:, :-1].float()
            loss = F.cross_entropy(guess.flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("epsilon_underflow", "fatal", within=6, accept=("loss_in_fp16",))
def blank_recordings(lab: Lab, fault: bool) -> Happened:
    """Contrastive learning without biases: a silent recording is embedded at 0, and normalize's 1e-12 is 0 in float16."""
    onset = 30 + lab.seed % 5
    model = nn.Sequential(nn.Linear(40, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        sound, _ = tones(24, 40)
        if step >= onset:
            sound[3] = 0
        with half():
            left, right = model(sound), model(sound * (0.9 + 0.2 * torch.rand(24, 1)))
        if fault:
            left, right = F.normalize(left), F.normalize(right)
        else:
            left, right = F.normalize(left.float(), eps=1e-1), F.normalize(right.float(), eps=1e-1)
        loss = F.cross_entropy(left.float() @ right.float().T / 0.2, torch.arange(24))
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("buffers_poisoned", "fatal", within=6, where=("book", "book.codes"))
def codes_that_met_a_broken_frame(lab: Lab, fault: bool) -> Happened:
    """A VQ autoencoder: one frame that is not a number is averaged into a code, which is then nearest to everything."""
    onset = 40 + lab.seed % 9
    book = Codebook(16, 8)
    model = nn.ModuleDict({"enter": stack(16, 24, 8), "book": book, "leave": stack(8, 24, 16)})
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 20):
        x, _ = tones(48, 16)
        if fault and step == onset:
            x[7, 3] = math.nan
        with half():
            code, commitment = book(model["enter"](x))
            loss = F.mse_loss(model["leave"](code).float(), x) + 0.25 * commitment
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("buffers_poisoned", "fatal", within=25, where=("1", "1.running_mean", "1.running_var"))
def a_price_in_the_wrong_currency(lab: Lab, fault: bool) -> Happened:
    """One row of a table holds 4e8 where others hold about 1; BatchNorm keeps the infinity that its step was spared."""
    onset = 35 + lab.seed % 8
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 45):
        x, clicked = clicks(64)
        if fault and step == onset:
            x[11, 4] = 4e8
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x)[:, 0].float(), clicked)
        advance(lab, scaler, optimizer, loss)
    return Happened(onset)


@faulty("weights_poisoned", "fatal", within=6, where=("decoder", "decoder.weight"))
def pruned_and_then_normalised(lab: Lab, fault: bool) -> Happened:
    """A sparse autoencoder keeps its features at length 1; once those that are least used are set to 0, that is 0/0."""
    onset = 45 + lab.seed % 6
    encoder, decoder = nn.Linear(12, 48), nn.Linear(48, 12, bias=False)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 16):
        now, _ = spring(64)
        with half():
            used = F.relu(encoder(now))
            loss = F.mse_loss(decoder(used).float(), now) + 1e-3 * used.float().abs().mean()
        advance(lab, scaler, optimizer, loss)
        with torch.no_grad():
            if step == onset - 1:
                decoder.weight[:, used.float().mean(0).argsort()[:3]] = 0.0
            length = decoder.weight.norm(dim=0, keepdim=True)
            decoder.weight /= length if fault else length.clamp(min=1e-6)
    return Happened(onset)


@faulty("bad_batch", "warning", within=1)
def two_atoms_in_one_place(lab: Lab, fault: bool) -> Happened:
    """An energy from inverse distances; one molecule of the fixed order holds an atom twice, in every epoch."""
    broken = 5 + lab.seed % 7
    places = torch.randn(14, 12, 5, 3)
    if fault:
        places[broken, 4, 2] = places[broken, 4, 0]
    model = stack(10, 32, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    pairs = torch.triu_indices(5, 5, 1)
    for step in lab.steps(84):
        atoms = places[step % 14]
        apart = (atoms[:, pairs[0]] - atoms[:, pairs[1]]).norm(dim=2)
        lab.log(epoch=step // 14, batch_id=step % 14)
        with half():
            loss = F.mse_loss(model(1 / apart).float()[:, 0], apart.mean(1))
        advance(lab, scaler, optimizer, loss)
    return Happened(broken)


@faulty("spike", "info")
def a_day_of_panic(lab: Lab, fault: bool) -> Happened:
    """One batch of the series is thirty times as wild; gradients are clipped after unscale_, and nothing is skipped."""
    onset = 70 + lab.seed % 9
    model = stack(12, 32, 12)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**6)
    for step in lab.steps(onset + 40):
        now, then = spring(32)
        with half():
            loss = F.mse_loss(model(now).float(), then * (30 if fault and step == onset else 1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
    return Happened(onset)


@faulty("norm_overflow", "error", within=1)
def a_norm_of_its_own(lab: Lab, fault: bool) -> Happened:
    """Prices in cents: the home-made clipping squares gradients above 256 in float16, and so divides them by infinity."""
    model = stack(12, 32, 12)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=8.0)
    for _ in lab.steps(40):
        now, then = spring(32)
        with half():
            loss = F.mse_loss(100 * model(now).float(), 100 * then)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        squares = [(g.half() if fault else g).square().sum() for g in grads]
        norm = torch.stack(squares).sum().sqrt().float()
        for grad in grads:
            grad.mul_((1000 / norm).clamp(max=1.0))
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
        lab.log(grad_norm=float(norm))
    return Happened(0)


@faulty("missing_scaler", "error", within=1)
def only_the_autocast_was_copied(lab: Lab, fault: bool) -> Happened:
    """A tutorial's autocast line with float16, and no loss scaler anywhere."""
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    lab.watch(optimizer, model)
    for _ in lab.steps(40):
        x, kind = tones(16)
        with torch.autocast("cpu", dtype=torch.float16 if fault else torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lab.log(loss=lab.note(loss))
    return Happened(0)
