"""Loops that are healthy, and often taken for ill."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loops.lab import Lab, half, healthy

from .models import (
    Composer,
    Denoiser,
    Humming,
    Potters,
    Segmenter,
    Switch,
    Towers,
    average,
    cells,
    denoised,
    dense,
    leaves,
    melodies,
    paired,
    rings,
    settle,
    sung,
    turn,
    views,
    weather,
)
from .order import foretold, sorted_leaves


@healthy
def potters_with_a_penalty_on_the_slope(lab: Lab) -> None:
    """A critic whose slope is penalised, by gradients of scaled outputs; a step and an update for each optimizer."""
    model = Potters()
    makers = torch.optim.Adam(model.maker.parameters(), 1e-3, (0.5, 0.9))
    critics = torch.optim.Adam(model.critic.parameters(), 1e-3, (0.5, 0.9))
    scaler = lab.scaler(model)
    for _ in lab.steps(120):
        true = rings()
        with half():
            false = model.made().detach().float()
        share = torch.rand(len(true), 1)
        between = (share * true + (1 - share) * false).requires_grad_()
        with half():
            score = model.critic(between).float().sum()
        (slope,) = torch.autograd.grad(scaler.scale(score), between, create_graph=True)
        length = (slope / scaler.get_scale()).square().sum(1).add(1e-12).sqrt()
        with half():
            gap = model.critic(false).float().mean() - model.critic(true).float().mean()
        turn(lab, scaler, critics, gap + 10 * (length - 1).square().mean())
        with half():
            loss = -model.critic(model.made()).float().mean()
        turn(lab, scaler, makers, loss)


@healthy
def composer_at_its_ceiling(lab: Lab) -> None:
    """A growth interval of 25: a skip for each, all through the run."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**15, growth_interval=25)
    for _ in lab.steps(320):
        with half():
            loss = sung(model, melodies(12))
        turn(lab, scaler, optimizer, loss)


@healthy
def scans_from_two_to_the_twenty_four(lab: Lab) -> None:
    """A U-Net with batch norms that starts far too high."""
    model = Segmenter()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scaler = lab.scaler(model, init_scale=2.0**24)
    for _ in lab.steps(120):
        x, mask = cells(8)
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), mask)
        turn(lab, scaler, optimizer, loss)


@healthy
def one_batch_of_strange_leaves(lab: Lab) -> None:
    """The labels of one batch are shuffled and its outlines five times too large: a spike of the loss, and nothing after."""
    model = dense(16, 48, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(200):
        x, kind = leaves(64)
        if step == 120:
            x, kind = 5 * x, kind.roll(1)
        with half():
            loss = F.cross_entropy(model(x).float(), kind)
        turn(lab, scaler, optimizer, loss, clip=1.0)


@healthy
def only_the_head_is_tuned(lab: Lab) -> None:
    """All but the head is frozen, and the optimizer was given everything."""
    model = Composer()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head"))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(100):
        with half():
            loss = sung(model, melodies(24))
        turn(lab, scaler, optimizer, loss)


@healthy
def experts_that_nobody_asks(lab: Lab) -> None:
    """A router that begins with a strong liking for two of its four experts; the others have no gradient for long."""
    model = Switch(10, 3)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([6.0, 6.0, -6.0, -6.0]))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(150):
        turn(lab, scaler, optimizer, foretold(model))


class Gated(nn.Module):
    """Residual layers behind gates that begin at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense(16, 32, 16) for _ in range(4))
        self.gates = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = x + gate * layer(x)
        out: torch.Tensor = self.head(x)
        return out


@healthy
def gates_that_begin_shut(lab: Lab) -> None:
    """Behind a gate of 0 every gradient of a layer is exactly 0 at first."""
    model = Gated()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(130):
        turn(lab, scaler, optimizer, sorted_leaves(model))


@healthy
def noise_in_bfloat16_alone(lab: Lab) -> None:
    """bfloat16 without a scaler, its optimizer watched."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    lab.watch(optimizer, model)
    for _ in lab.steps(150):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = denoised(model)
        optimizer.zero_grad()
        loss.backward()
        lab.log(loss=lab.note(loss))
        optimizer.step()


@healthy
def a_plateau_before_it_is_understood(lab: Lab) -> None:
    """The parity of four signs: a loss at log 2 for most of the run."""
    model = dense(8, 48, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    scaler = lab.scaler(model, growth_interval=100)
    for _ in lab.steps(400):
        x = torch.randn(64, 8).sign()
        with half():
            score = model(x)[:, 0].float()
        loss = F.binary_cross_entropy_with_logits(score, (x[:, :4].prod(1) > 0).float())
        turn(lab, scaler, optimizer, loss)


@healthy
def a_margin_that_is_kept_by_all(lab: Lab) -> None:
    """Sixteen samples learnt by heart with a hinge: the loss ends at exactly 0, and so do all gradients."""
    model = dense(16, 48, 6)
    x, kind = leaves(16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = lab.scaler(model)
    for _ in lab.steps(220):
        with half():
            loss = F.multi_margin_loss(model(x).float(), kind)
        turn(lab, scaler, optimizer, loss)


@healthy
def validated_every_ten_steps(lab: Lab) -> None:
    """In between the model is evaluated in float32, on pictures that it is bad at, and put back."""
    model = Segmenter()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(100):
        x, mask = cells(8)
        with half():
            loss = F.binary_cross_entropy_with_logits(model(x).float(), mask)
        turn(lab, scaler, optimizer, loss)
        if step % 10 == 9:
            with torch.no_grad():
                model.eval()
                lab.log(validation=float(F.mse_loss(model(50 * x), mask)))
            model.train()


@healthy
def a_student_of_its_own_average(lab: Lab) -> None:
    """Three forward passes for each step: a teacher that is the moving average, and two views of the student."""
    model, teacher = dense(10, 48, 24), dense(10, 48, 24)
    teacher.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(150):
        a, b = views(48)
        with half():
            with torch.no_grad():
                wanted = (teacher(a).float() / 0.1).softmax(1)
            losses = [-(wanted * (model(v).float() / 0.2).log_softmax(1)).sum(1).mean() for v in (a, b)]
        turn(lab, scaler, optimizer, losses[0] + losses[1])
        average(teacher, model, 0.98)


@healthy
def recomputed_in_backward(lab: Lab) -> None:
    """Blocks are checkpointed: each is run twice."""
    first, second, head = dense(16, 48, 48), dense(48, 48, 48), nn.Linear(48, 6)
    model = nn.Sequential(first, second, head)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model, init_scale=2.0**20)
    for _ in lab.steps(120):
        x, kind = leaves(64)
        with half():
            inner = checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)
            loss = F.cross_entropy(head(inner).float(), kind)
        turn(lab, scaler, optimizer, loss)


@healthy
def two_scalers_side_by_side(lab: Lab) -> None:
    """Two models in one script, with a scaler and an optimizer each; the second one learns every other time."""
    models = dense(16, 32, 6), Humming()
    optimizers = [torch.optim.AdamW(m.parameters(), 2e-3) for m in models]
    scalers = [lab.scaler(m, growth_interval=40) for m in models]
    for step in lab.steps(120):
        turn(lab, scalers[0], optimizers[0], sorted_leaves(models[0]))
        if step % 2:
            with half():
                loss = sung(models[1], melodies(16))
            turn(lab, scalers[1], optimizers[1], loss)


@healthy
def words_with_sparse_rows(lab: Lab) -> None:
    """An embedding with sparse gradients in float32, most rows never seen in a batch."""
    table, head = nn.Embedding(500, 16, sparse=True), dense(16, 32, 5)
    model = nn.ModuleDict({"table": table, "head": head})
    rows, rest = torch.optim.SparseAdam(table.parameters(), 1e-2), torch.optim.AdamW(head.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(120):
        words = torch.randint(500, (64,))
        with half():
            loss = F.cross_entropy(head(table(words)).float(), words % 5)
        rows.zero_grad()
        rest.zero_grad()
        scaler.scale(loss).backward()
        settle(scaler, rows, rest)
        lab.note(loss)


@healthy
def evaluated_with_averaged_weights(lab: Lab) -> None:
    """Every 20 steps averaged weights are put in place, evaluated, and taken out again."""
    model = Composer()
    mean = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(100):
        with half():
            loss = sung(model, melodies(24))
        if turn(lab, scaler, optimizer, loss):
            average(mean, model, 0.9)
        if step % 20 == 19:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(mean.state_dict())
            with torch.no_grad(), half():
                sung(model, melodies(48))
            model.load_state_dict(kept)


@healthy
def restarts_that_shake_it(lab: Lab) -> None:
    """Warm restarts to a rate that makes the loss jump each time, and settle."""
    model = dense(10, 48, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50, eta_min=1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(200):
        if turn(lab, scaler, optimizer, foretold(model, 64)):
            schedule.step()


@healthy
def a_policy_with_normalised_returns(lab: Lab) -> None:
    """REINFORCE: a loss around 0 of either sign, which does not fall."""
    model = dense(10, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(200):
        seen = torch.randn(64, 10)
        with half():
            chances = model(seen).float().log_softmax(1)
        act = torch.multinomial(chances.detach().exp(), 1)
        reward = 1000 * seen.gather(1, act)[:, 0]
        gain = (reward - reward.mean()) / reward.std()
        turn(lab, scaler, optimizer, -(gain * chances.gather(1, act)[:, 0]).mean(), clip=0.5)


@healthy
def mixed_and_smoothed_labels(lab: Lab) -> None:
    """Label smoothing and mixed pairs: a loss that stays near 1."""
    model = dense(16, 48, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(200):
        x, kind = leaves(64)
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(64)
        with half():
            score = model(share * x + (1 - share) * x[order]).float()
            losses = [F.cross_entropy(score, k, label_smoothing=0.1) for k in (kind, kind[order])]
        turn(lab, scaler, optimizer, share * losses[0] + (1 - share) * losses[1])


@healthy
def silence_behind_minus_infinity(lab: Lab) -> None:
    """The causal mask is a buffer of -inf, and padded ends are -1e4; each query sees itself."""
    model = Composer()
    model.register_buffer("causal", torch.full((15, 15), -torch.inf).triu(1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(100):
        notes = melodies(24)
        notes[::3, 10:] = 0
        bias = model.causal + (notes[:, None, :-1] == 0) * -1e4
        with half():
            loss = sung(lambda seen, bias=bias: model(seen, bias), notes)
        turn(lab, scaler, optimizer, loss)


@healthy
def hummed_and_clipped(lab: Lab) -> None:
    """A recurrent network, clipped after unscale_ to a norm that it always exceeds, by melodies of any length."""
    model = Humming()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**18, growth_interval=60)
    for step in lab.steps(160):
        with half():
            loss = sung(model, melodies(16, 6 + 3 * (step % 7)))
        turn(lab, scaler, optimizer, loss, clip=0.05)


@healthy
def the_last_window_is_short(lab: Lab) -> None:
    """Windows of four parts, the last of each epoch of one or three; each loss is divided by how many there are."""
    model = Composer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(80):
        parts = (4, 4, 4, 4, 4, 4, 3, 4, 4, 1)[step % 10]
        optimizer.zero_grad()
        for _ in range(parts):
            with half():
                loss = sung(model, melodies(8)) / parts
            scaler.scale(loss).backward()
            lab.note(loss)
        settle(scaler, optimizer)


@healthy
def a_copy_goes_on(lab: Lab) -> None:
    """Half way a deep copy takes the model's place, with an optimizer of its own and the same scaler."""
    model = dense(16, 32, 6)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for step in lab.steps(140):
        if step == 70:
            model = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        turn(lab, scaler, optimizer, sorted_leaves(model))


@healthy
def a_temperature_with_a_limit(lab: Lab) -> None:
    """Two towers and a learnt temperature, clamped in place after each step; the loss comes near 0."""
    model = Towers()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.seen.parameters(), *model.read.parameters()]},
            {"params": [model.warmth], "lr": 5e-2, "weight_decay": 0.0},
        ],
        5e-3,
    )
    scaler = lab.scaler(model)
    for _ in lab.steps(200):
        with half():
            loss = paired(model(*views(32)))
        turn(lab, scaler, optimizer, loss)
        with torch.no_grad():
            model.warmth.clamp_(0, 4.6052)


@healthy
def compiled_in_eager_mode(lab: Lab) -> None:
    """torch.compile, with the backend that leaves operators as they are."""
    model = dense(10, 48, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    faster = torch.compile(model, backend="eager")
    for _ in lab.steps(80):
        turn(lab, scaler, optimizer, foretold(faster))


@healthy
def resumed_with_all_of_its_state(lab: Lab) -> None:
    """Model, optimizer and scaler are restored in a second job, at a scale far from the initial one."""
    model, optimizer, kept = Humming(), None, {}
    for start, end in ((0, 70), (70, 140)):
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        scaler = lab.scaler(model, init_scale=2.0**24)
        if kept:
            optimizer.load_state_dict(kept["optimizer"])
            scaler.load_state_dict(kept["scaler"])
        for _ in lab.steps(end, start):
            with half():
                loss = sung(model, melodies(24))
            turn(lab, scaler, optimizer, loss)
        kept = {
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "scaler": copy.deepcopy(scaler.state_dict()),
        }
        lab.restart()


@healthy
def noise_of_every_strength(lab: Lab) -> None:
    """A diffusion model whose loss is weighted by the noise: neighbouring losses and norms differ by much."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, growth_interval=50)
    for _ in lab.steps(240):
        level = torch.rand(1).pow(3).clamp(min=0.1).expand(16, 1)
        noise = torch.randn(16, 2)
        with half():
            guess = model((1 - level) * rings(16) + level * noise, level).float()
        turn(lab, scaler, optimizer, F.mse_loss(guess, noise) / level[0, 0].square())


@healthy
def a_rate_that_begins_at_zero(lab: Lab) -> None:
    """Ten steps at a learning rate of 0, then a warm-up: at first no weight moves."""
    model = dense(10, 32, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, max(0, n - 10) / 30))
    scaler = lab.scaler(model)
    for _ in lab.steps(120):
        now, then = weather(64)
        with half():
            loss = F.huber_loss(model(now).float(), then)
        if turn(lab, scaler, optimizer, loss):
            schedule.step()
