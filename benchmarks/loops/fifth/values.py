"""A number that is not finite: in the forward pass, in the loss, in the data, in buffers or in weights."""

import torch
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Coplay,
    Household,
    Microscope,
    Mixer,
    Shop,
    baskets,
    cells,
    houses,
    load_curve,
    mlp,
    trained,
)


@faulty("forward_overflow", "fatal", within=6, where=("stem.1", "stem"))
def pixels_that_nobody_divided(lab: Lab, fault: bool) -> Happened:
    """From an epoch on a second loader hands out the counts of 12 bits instead of 0 to 1; the mixer's stem squares its ReLU."""
    onset = 44 + lab.seed % 7
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**13)
    for step in lab.steps(onset + 16):
        x, kind = cells(24)
        with half():
            logits = model(x * 4095 if fault and step >= onset else x)
        trained(lab, scaler, optimizer, F.cross_entropy(logits.float(), kind))
    return Happened(onset)


@faulty("forward_overflow", "fatal", within=6, where=("mix",))
def whole_weeks_at_once(lab: Lab, fault: bool) -> Happened:
    """Linear attention sums exp(k) over all positions; after days of 24 values come quarters of 2048, and the sums leave float16."""
    onset = 56 + lab.seed % 6
    model = Household(mean=not fault)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        x, sort = load_curve(16, 24) if step < onset else load_curve(4, 2048)
        with half():
            logits = model(x)
        trained(lab, scaler, optimizer, F.cross_entropy(logits.float(), sort))
    return Happened(onset)


@faulty("loss_in_fp16", "fatal", within=6)
def a_student_at_a_lower_temperature(lab: Lab, fault: bool) -> Happened:
    """Distillation by the logarithm of a softmax in float16: as the temperature goes from 4 to 0.2, shares of 0 get a logarithm."""
    onset = 54 + lab.seed % 8
    teacher, student = mlp(10, 48, 12).requires_grad_(False), mlp(10, 32, 12, deep=2)
    for parameter in teacher[2].parameters():
        parameter.mul_(15)  # as sure as one that is trained
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    scaler = lab.scaler(student, init_scale=2.0**12)
    for step in lab.steps(onset + 14):
        asked = torch.randn(64, 10)
        temperature = 4.0 if step < onset else 0.2
        with half():
            told, said = teacher(asked) / temperature, student(asked) / temperature
            if fault:
                know, guess = told.softmax(1).log(), said.softmax(1).log()
            else:
                know, guess = told.float().log_softmax(1), said.float().log_softmax(1)
            loss = temperature**2 * (know.exp() * (know - guess)).sum(1).mean()
        trained(lab, scaler, optimizer, loss.float())
    return Happened(onset)


@faulty("mask_constant", "fatal", within=6, where=("pool",))
def customers_without_a_history(lab: Lab, fault: bool) -> Happened:
    """The mask's -1e9 is minus infinity in float16; that does no harm until new customers come, of whom nothing is known."""
    onset = 50 + lab.seed % 8
    model = Shop(fill=-1e9 if fault else -1e4)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 14):
        product, history, bought = baskets(64)
        if step >= onset:
            history[:5] = 0
        with half():
            score = model(product, history)
        trained(lab, scaler, optimizer, F.binary_cross_entropy_with_logits(score.float(), bought))
    return Happened(onset)


@faulty("nonfinite_forward", "fatal", within=2)
def a_column_that_never_changes(lab: Lab, fault: bool) -> Happened:
    """Each part of a table is standardised by itself; in the last part a column is constant, and 0/0 comes with every row."""
    onset = 48 + lab.seed % 6
    model = mlp(8, 32, 1, deep=2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 15):
        x, price = houses(64)
        if step >= onset:
            x[:, 5] = 2.0
        spread = x.std(0)
        x = (x - x.mean(0)) / (spread if fault else spread + 1e-3)
        with half():
            guess = model(x)
        trained(lab, scaler, optimizer, F.mse_loss(guess.float(), price))
    return Happened(onset)


@faulty("buffers_poisoned", "fatal", within=25, where=("bn1", "bn1.running_mean", "bn1.running_var"))
def one_saturated_exposure(lab: Lab, fault: bool) -> Happened:
    """One picture of 2e5 counts: its step is skipped and training goes on, but the running statistics stay infinite."""
    onset = 52 + lab.seed % 9
    model = Microscope()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 40):
        x, kind = cells(32)
        if fault and step == onset:
            x[4] *= 2e5
        with half():
            logits = model(x)
        trained(lab, scaler, optimizer, F.cross_entropy(logits.float(), kind))
    return Happened(onset)


@faulty("weights_poisoned", "fatal", within=6, where=("songs", "songs.weight"))
def a_song_nobody_has_played(lab: Lab, fault: bool) -> Happened:
    """New songs start from the mean of those that are played with them; for one there is none, and a mean of nothing is NaN."""
    onset = 60 + lab.seed % 8
    model = Coplay()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(onset + 20):
        if step == onset:
            played_with = {51: [3, 8], 52: [12, 20, 31], 53: [] if fault else [7]}
            with torch.no_grad():
                for new, others in played_with.items():
                    model.songs.weight[new] = model.songs.weight[others].mean(0)
        listener, song = torch.randint(50, (512,)), torch.randint(51 if step < onset else 54, (512,))
        likes = ((listener + song) % 3 == 0).float()
        with half():
            score = model(listener, song)
        trained(lab, scaler, optimizer, F.binary_cross_entropy_with_logits(score.float(), likes))
    return Happened(onset)


@faulty("bad_batch", "warning", within=1)
def a_transcript_longer_than_its_recording(lab: Lab, fault: bool) -> Happened:
    """CTC over a fixed order of 11 batches: in one a transcript has more letters than frames, so its loss is infinite in each epoch."""
    broken = 3 + lab.seed % 6
    frames, letters = torch.randn(11, 8, 20, 6), torch.randint(1, 5, (11, 8, 4))
    for place in range(4):
        frames[:, :, 5 * place : 5 * place + 3] += 2 * F.one_hot(letters[:, :, place], 6)[:, :, None]
    lengths = torch.full((11, 8), 20)
    if fault:
        lengths[broken, 2] = 3
    model = mlp(6, 32, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(77):
        batch = step % 11
        lab.log(epoch=step // 11, batch_id=batch)
        with half():
            spoken = model(frames[batch])
        chances = spoken.float().log_softmax(2).transpose(0, 1)
        loss = F.ctc_loss(chances, letters[batch], lengths[batch], torch.full((8,), 4))
        trained(lab, scaler, optimizer, loss)
    return Happened(broken)


@faulty("no_updates", "error", "fatal", within=5)
def distances_of_each_to_itself(lab: Lab, fault: bool) -> Happened:
    """A triplet loss over its own matrix of distances: the root of the 0 on the diagonal makes each gradient NaN, the loss is fine."""
    model = mlp(12, 48, 8)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(36):
        sort = torch.randint(4, (32,))
        x = torch.randn(32, 12) + 1.5 * F.one_hot(sort, 12)
        with half():
            place = model(x).float()
        square = (place[:, None] - place[None]).square().sum(2)
        apart = square.sqrt() if fault else (square + 1e-4).sqrt()
        same = sort[:, None] == sort[None]
        farthest = (apart * same).amax(1)
        nearest = (apart + 1e3 * same).amin(1)
        trained(lab, scaler, optimizer, F.softplus(farthest - nearest).mean())
    return Happened(16)
