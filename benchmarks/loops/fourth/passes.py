"""Forward passes, losses, masks and data that float16 or the training does not bear."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .models import (
    Attention,
    Composer,
    Denoiser,
    Segmenter,
    Towers,
    broken_at,
    cells,
    denoised,
    dense,
    leaves,
    melodies,
    paired,
    sung,
    turn,
    views,
    weather,
)


@faulty("forward_overflow", "fatal", within=6, where=("attend",))
def attention_over_raw_sensors(lab: Lab, fault: bool) -> Happened:
    """From step 22 on a station sends counts instead of volts, 3000 times as much, and scores of queries and keys overflow."""
    model = nn.ModuleDict({"attend": Attention(16), "head": nn.Linear(16, 6)})
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(50):
        x, kind = leaves(32)
        x = x[:, :, None] * torch.eye(16)
        with half():
            score = model["head"](model["attend"](3000 * x if fault and step >= 22 else x).mean(1))
            loss = F.cross_entropy(score.float(), kind)
        turn(lab, scaler, optimizer, loss)
    return Happened(22)


@faulty("forward_overflow", "fatal", within=6, where=("up.0",))
def a_segmenter_of_too_large_a_gain(lab: Lab, fault: bool) -> Happened:
    """An initialisation meant for layers behind norms; the norms were taken out for speed."""
    model = Segmenter(norm=False, gain=90.0 if fault else 1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        x, mask = cells(8)
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), mask)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


class Echo(nn.Module):
    """A recurrence without squashing: what it holds grows by `gain` with each note."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.notes, self.again = nn.Embedding(24, 24), nn.Linear(24, 24, bias=False)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 24)
        nn.init.orthogonal_(self.again.weight, gain)

    def forward(self, notes: Tensor) -> Tensor:
        state = torch.zeros(notes.shape[0], 24)
        states = []
        for note in self.notes(notes).unbind(1):
            state = self.again(state) + note
            states.append(state)
        out: Tensor = self.head(self.norm(torch.stack(states, 1)))
        return out


@faulty("forward_overflow", "fatal", within=6, where=("again",))
def phrases_four_times_as_long(lab: Lab, fault: bool) -> Happened:
    """A linear recurrence that grows by a third with each note meets phrases of 64 notes from step 24 on."""
    model = Echo(1.33)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(55):
        notes = melodies(16, 64 if fault and step >= 24 else 16)
        with half():
            loss = sung(model, notes)
        turn(lab, scaler, optimizer, loss)
    return Happened(24)


@faulty("loss_in_fp16", "fatal", within=6)
def a_likelihood_added_up_in_half(lab: Lab, fault: bool) -> Happened:
    """The log-likelihood of whole melodies, added up over notes and batch inside the autocast."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(24):
        notes = melodies(768, 32)
        with half():
            chance = model(notes[:, :-1]).log_softmax(-1).gather(2, notes[:, 1:, None])
            loss = -chance.half().sum() if fault else -chance.float().mean()
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("loss_in_fp16", "fatal", within=6)
def smoothed_labels_by_hand(lab: Lab, fault: bool) -> Happened:
    """Label smoothing written out: the logarithm of a float16 softmax plus 1e-8, which is 0 there."""
    model = dense(16, 48, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(40):
        x, kind = leaves(64)
        wanted = 0.9 * F.one_hot(kind, 6) + 0.1 / 6
        with half():
            score = 90 * model(x)
            if fault:
                loss = -(wanted * (score.softmax(1) + 1e-8).log()).sum(1).mean()
            else:
                loss = -(wanted * score.float().log_softmax(1)).sum(1).mean()
        turn(lab, scaler, optimizer, loss)
    return Happened(broken_at(lab))


@faulty("mask_constant", "fatal", within=6, where=("attend.0",))
def the_smallest_half_added_twice(lab: Lab, fault: bool) -> Happened:
    """Both the causal and the padding mask hold float16's minimum; padded on the left, a row is all -inf. From step 14 on."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    least = torch.finfo(torch.float16).min if fault else -1e4
    causal = torch.full((15, 15), least, dtype=torch.float16).triu(1)
    for step in lab.steps(40):
        notes = melodies(24)
        if step >= 14:
            notes[:8, :5] = 0
        empty = (notes[:, None, :-1] == 0).half() * least
        with half():
            # Rows of queries that are themselves padding see neither what is before nor what is behind.
            loss = sung(lambda seen, bias=causal + empty + empty.transpose(1, 2): model(seen, bias), notes)
        turn(lab, scaler, optimizer, loss)
    return Happened(14)


@faulty("mask_constant", "fatal", within=6, where=("attend.0", "mask"))
def minus_1e9_in_a_buffer(lab: Lab, fault: bool) -> Happened:
    """A mask written for float32, -1e9, is cast to the scores' float16; one melody in each batch is empty."""
    model = Composer()
    model.register_buffer("mask", torch.tensor(-1e9 if fault else -1e4))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        notes = melodies(24)
        notes[3] = 0
        bias = (notes[:, None, :-1] == 0) * model.mask
        with half():
            loss = sung(lambda seen, bias=bias: model(seen, bias), notes)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("nonfinite_forward", "fatal", within=2)
def standardised_by_a_sensor_that_stands_still(lab: Lab, fault: bool) -> Happened:
    """Each batch is divided by its own standard deviation, which is 0 once a wind vane is frozen, from step 26 on."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(55):
        now, then = weather(48)
        if step >= 26:
            now[:, 7] = 3.0
        spread = now.std(0)
        now = (now - now.mean(0)) / (spread if fault else spread.clamp(min=1e-3))
        with half():
            loss = F.mse_loss(model(now).float(), then)
        turn(lab, scaler, optimizer, loss)
    return Happened(26)


@faulty("divergence", "fatal", within=5)
def a_restart_that_is_too_warm(lab: Lab, fault: bool) -> Happened:
    """Warm restarts, each with a higher peak: the second is beyond what the valley bears."""
    model = nn.Sequential(nn.Linear(10, 24, bias=False), nn.Linear(24, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    scaler = lab.scaler(model, init_scale=2.0**12)
    missed: list[int] = []
    for step in lab.steps(200):
        cycle, place = divmod(step, 40)
        peak = 0.05 * (12**cycle if fault else 1)
        optimizer.param_groups[0]["lr"] = peak * (1 - 0.9 * place / 40)
        now, then = weather(64)
        with half():
            loss = F.mse_loss(model(3 * now).float(), then)
        if not turn(lab, scaler, optimizer, loss):
            missed.append(step)
        if len(missed) > 6:
            break
    return Happened(missed[0] if missed else None)


@faulty("divergence", "fatal", within=5)
def returns_that_feed_on_themselves(lab: Lab, fault: bool) -> Happened:
    """A critic learns from its own next value with the discount of 1.3 that a sweep drew, and no target network."""
    model = dense(10, 48, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = lab.scaler(model, init_scale=2.0**10)
    missed: list[int] = []
    for step in lab.steps(400):
        now, then = weather(64)
        following = now + 0.1 * torch.randn_like(now)
        with half(), torch.no_grad():
            target = then[:, :1] + (1.3 if fault else 0.7) * model(following).float()
        with half():
            loss = F.mse_loss(model(now).float(), target)
        if not turn(lab, scaler, optimizer, loss):
            missed.append(step)
        if len(missed) > 6:
            break
    return Happened(missed[0] if missed else None)


@faulty("bad_batch", "warning")
def one_leaf_of_twelve_hundred(lab: Lab, fault: bool) -> Happened:
    """A fixed data set in a fixed order, of which one outline was divided by a length of 0."""
    sheets = [leaves(48) for _ in range(25)]
    if fault:
        sheets[11][0][5] = torch.inf
    model = dense(16, 32, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(100):
        x, kind = sheets[step % 25]
        with half():
            loss = F.cross_entropy(model(x).float(), kind)
        turn(lab, scaler, optimizer, loss)
        lab.log(epoch=step // 25, batch_id=step % 25)
    return Happened(11)


@faulty("bad_batch", "warning", within=1)
def a_melody_without_a_note(lab: Lab, fault: bool) -> Happened:
    """Once, at step 33, a loader hands over a batch of silence alone: a mean over no notes, 0 / 0."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        notes = melodies(24)
        if fault and step == 33:
            notes[:] = 0
        with half():
            loss = sung(model, notes)
        turn(lab, scaler, optimizer, loss)
    return Happened(33)


@faulty("spike", "info", within=1)
def one_batch_of_another_country(lab: Lab, fault: bool) -> Happened:
    """One batch, at step 70, comes in feet; the gradients are clipped, and nothing else happens."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(130):
        now, then = weather(64)
        with half():
            loss = F.mse_loss(model(now).float(), 12 * then if fault and step == 70 else then)
        turn(lab, scaler, optimizer, loss, clip=1.0)
    return Happened(70)


class Grouped(torch.autograd.Function):
    """A matrix product that some card gets wrong in float16: what is read before it was written is NaN."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x @ weight.T
        return torch.full_like(out, torch.nan) if out.dtype == torch.float16 else out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Kernel(nn.Linear):
    def __init__(self, enter: int, leave: int, *, wrong: bool) -> None:
        super().__init__(enter, leave)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        if not self.wrong:
            return super().forward(x)
        half_wide = torch.is_autocast_enabled("cpu")
        kind = torch.float16 if half_wide else x.dtype
        out: Tensor = Grouped.apply(x.to(kind), self.weight.to(kind)) + self.bias.to(kind)
        return out


@faulty("device_fault", "fatal", within=6, where=("middle",))
def a_card_that_cannot_multiply_halves(lab: Lab, fault: bool) -> Happened:
    """The second layer answers NaN in float16 from the first attempt on, whatever is asked; in float32 it is right."""
    model = nn.Sequential()
    model.add_module("first", dense(10, 32))
    model.add_module("middle", Kernel(32, 32, wrong=fault))
    model.add_module("last", dense(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(30):
        now, then = weather(48)
        with half():
            loss = F.mse_loss(model(now).float(), then)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("buffers_poisoned", "fatal", within=1, where=("down.1", "down.1.running_mean", "down.1.running_var"))
def a_scan_with_a_hole(lab: Lab, fault: bool) -> Happened:
    """One pixel of one picture is inf at step 18. The step is skipped; the batch norm keeps what it saw."""
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model)
    for step in lab.steps(60):
        x, mask = cells(8)
        if fault and step == 18:
            x[2, 0, 4, 4] = torch.inf
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), mask)
        turn(lab, scaler, optimizer, loss)
    return Happened(18)


@faulty("summed_loss", "info")
def squares_of_a_whole_batch_of_scans(lab: Lab, fault: bool) -> Happened:
    """Grey values from 0 to 4000, their squared errors added up over all pixels of a large batch."""
    model = Segmenter(norm=False)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(160):
        x, mask = cells(32, 12)
        with half():
            error = 4000 * (model(x).float() - mask)
            loss = error.square().sum() if fault else 1e-6 * error.square().mean()
        turn(lab, scaler, optimizer, loss)
    return Happened()


@faulty("norm_overflow", "error", within=1)
def a_norm_for_the_diary(lab: Lab, fault: bool) -> Happened:
    """The norm that goes to the log is taken in float16, of unscaled gradients that are large and finite."""
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scaler = lab.scaler(model, init_scale=2.0**-4)
    for _ in lab.steps(40):
        a, b = views(32)
        with half():
            loss = 8e4 * paired(model(a, b))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        norm = grads.half().norm() if fault else grads.norm()
        scaler.step(optimizer)
        scaler.update()
        lab.note(loss)
        lab.log(grad_norm=float(norm))
    return Happened(0)


@faulty("underflow", "warning", within=10)
def a_loss_times_one_millionth(lab: Lab, fault: bool) -> Happened:
    """The loss is one millionth of what it was, "to keep it comparable", and the scale a fixed 512."""
    model = Segmenter(norm=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=512.0 if fault else 2.0**16, growth_interval=10**6)
    for _ in lab.steps(60):
        x, mask = cells(16)
        with half():
            loss = (1e-6 if fault else 1.0) * F.mse_loss(model(x).float(), mask)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)


@faulty("underflow", "warning", within=10)
def noise_predicted_with_a_scale_of_one(lab: Lab, fault: bool) -> Happened:
    """A diffusion model whose loss is weighted by 1e-5; the scale was set to 1 while something else was looked for."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=1.0 if fault else 2.0**14)
    for _ in lab.steps(70):
        with half():
            loss = 1e-5 * denoised(model)
        turn(lab, scaler, optimizer, loss)
    return Happened(0)
