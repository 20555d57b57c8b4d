"""Architectures and data of the fifth set; none is wider than 64."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Lab, half


def trained(lab: Lab, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> bool:
    """One attempt in the order of the manual; whether its step was taken."""
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    lab.note(loss)
    return scaler.get_scale() >= scale


def mlp(enter: int, hidden: int, leave: int, deep: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(enter, hidden), nn.SiLU()]
    for _ in range(deep - 1):
        layers += [nn.Linear(hidden, hidden), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, leave))


# ---- pictures


def cells(batch: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Grey pictures (batch, 1, side, side) in 0 to 1 of one bright cell, and its quadrant."""
    kind = torch.randint(4, (batch,))
    centre = torch.stack([kind // 2, kind % 2], 1) * 0.9 - 0.45 + 0.15 * torch.randn(batch, 2)
    line = torch.linspace(-1, 1, side)
    y = (line[None, :, None] - centre[:, :1, None]).square()
    x = (line[None, None, :] - centre[:, 1:, None]).square()
    cell = (-6 * (x + y)).exp()
    return (0.8 * cell + 0.2 * torch.rand(batch, side, side))[:, None], kind


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(width), mlp(patches, 24, patches)
        self.norm2, self.channels = nn.LayerNorm(width), mlp(width, 48, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.norm2(x))
        return out


class Mixer(nn.Module):
    """An MLP-mixer over patches of 4 × 4, whose stem squares its ReLU."""

    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(16, width), SquaredReLU())
        self.blocks = nn.Sequential(MixerBlock(16, width), MixerBlock(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=4).transpose(1, 2)
        out: Tensor = self.head(self.norm(self.blocks(self.stem(patches))).mean(1))
        return out


class Microscope(nn.Module):
    """A convolutional classifier with BatchNorm."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.conv2, self.bn2 = nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24)
        self.fc = nn.Linear(24, classes)

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.features(x))
        return out


class Denoiser(nn.Module):
    """Three convolutions that take the noise out of a picture."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.into, self.within = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.into(x))
        out: Tensor = self.out(h + F.gelu(self.within(h)))
        return out


class PixelVAE(nn.Module):
    """A variational autoencoder of flat pictures."""

    def __init__(self, pixels: int = 64, latent: int = 6) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(pixels, 48, 2 * latent), mlp(latent, 48, pixels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The picture again, and the divergence of each latent from its prior, summed, per picture."""
        mean, logvar = self.encoder(x).float().clamp(-8, 8).chunk(2, 1)
        picture = self.decoder(mean + (logvar / 2).exp() * torch.randn_like(mean)).float()
        return picture, 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1)


# ---- sequences


def melody(batch: int, length: int = 14, notes: int = 24) -> Tensor:
    """Notes that go on by the interval before, or by a third."""
    tune = [torch.randint(notes, (batch,))]
    step = torch.randint(1, 4, (batch,))
    for _ in range(length - 1):
        step = torch.where(torch.rand(batch) < 0.1, 3, step)
        tune.append((tune[-1] + step) % notes)
    return torch.stack(tune, 1)


def load_curve(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Daily curves (batch, length, 3) of one of three sorts of household."""
    sort = torch.randint(3, (batch,))
    time = torch.arange(length) / 12
    phase = 2 * math.pi * torch.rand(batch, 1)
    waves = torch.stack([torch.sin((k + 1 + sort[:, None]) * time + phase) for k in range(3)], 2)
    return waves + 0.7 * F.one_hot(sort, 3)[:, None] + 0.2 * torch.randn(batch, length, 3), sort


class LinearAttention(nn.Module):
    """Attention by positive features, exp(q) and exp(k): linear in the length. Sums over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, *, mean: bool) -> Tensor:
        q, k, v = self.q(x).exp(), self.k(x).exp(), self.v(x)
        if mean:
            k = k / k.shape[1]
        context = k.transpose(1, 2) @ v
        total = q @ k.sum(1, keepdim=True).transpose(1, 2)
        out: Tensor = self.o((q @ context) / total)
        return out


class Household(nn.Module):
    def __init__(self, width: int = 32, *, mean: bool = False) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(3, width), nn.LayerNorm(width)
        self.mix, self.leave = LinearAttention(width), nn.Linear(width, 3)
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        out: Tensor = self.leave((x + self.mix(self.norm(x), mean=self.mean)).mean(1))
        return out


class Composer(nn.Module):
    """A GRU over notes, its cell written out."""

    def __init__(self, notes: int = 24, width: int = 32) -> None:
        super().__init__()
        self.notes = nn.Embedding(notes, width)
        self.both, self.new = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)
        self.next = nn.Linear(width, notes)

    def forward(self, tune: Tensor) -> Tensor:
        x = self.notes(tune)
        state, states = torch.zeros_like(x[:, 0]), []
        for now in x.unbind(1):
            forget, write = self.both(torch.cat([now, state], 1)).sigmoid().chunk(2, 1)
            candidate = self.new(torch.cat([now, forget * state], 1)).tanh()
            state = (1 - write) * state + write * candidate
            states.append(state)
        out: Tensor = self.next(torch.stack(states, 1))
        return out


class Scribe(nn.Module):
    """A causal transformer of two layers with its mask in a buffer of minus infinities."""

    future: Tensor

    def __init__(self, notes: int = 24, width: int = 32, length: int = 14) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(notes, width), nn.Embedding(length, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.ffn = nn.ModuleList(mlp(width, 64, width) for _ in range(2))
        self.ln = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.lm_head = nn.Linear(width, notes, bias=False)
        self.register_buffer("future", torch.full((length, length), -math.inf).triu(1))

    def forward(self, tune: Tensor) -> Tensor:
        n = tune.shape[1]
        x = self.embed(tune) + self.place(torch.arange(n))
        for i, (qkv, proj, ffn) in enumerate(zip(self.qkv, self.proj, self.ffn, strict=True)):
            q, k, v = qkv(self.ln[2 * i](x)).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + self.future[:n, :n]
            x = x + proj(scores.softmax(-1) @ v)
            x = x + ffn(self.ln[2 * i + 1](x))
        out: Tensor = self.lm_head(self.ln[4](x))
        return out


def composed(model: nn.Module, batch: int = 24) -> Tensor:
    """The loss of the next note."""
    tune = melody(batch)
    with half():
        logits = model(tune)[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), tune[:, 1:].flatten())


# ---- tables, shops and games


def houses(batch: int) -> tuple[Tensor, Tensor]:
    """Eight numbers of a house and its price."""
    x = torch.randn(batch, 8)
    return x, x[:, :1] * 0.8 + (x[:, 1:2] * x[:, 2:3]).tanh() + 0.1 * torch.randn(batch, 1)


def priced(model: nn.Module, batch: int = 64) -> Tensor:
    x, price = houses(batch)
    with half():
        guess = model(x)
    return F.mse_loss(guess.float(), price)


class HistoryPool(nn.Module):
    """What somebody has bought, weighted by how it fits the product that is looked at."""

    def __init__(self, width: int, fill: float) -> None:
        super().__init__()
        self.ask, self.answer, self.fill = nn.Linear(width, width), nn.Linear(width, width), fill

    def forward(self, product: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        scores = (self.answer(history) @ self.ask(product)[:, :, None])[..., 0] / 4
        scores = scores + (1 - mask.to(scores.dtype)) * self.fill
        out: Tensor = (scores.softmax(1)[:, None].to(history.dtype) @ history)[:, 0]
        return out


class Shop(nn.Module):
    """Whether a product will be bought, after what was bought before; product 0 is padding."""

    def __init__(self, products: int = 60, width: int = 16, fill: float = -1e4) -> None:
        super().__init__()
        self.products = nn.Embedding(products, width, padding_idx=0)
        self.pool, self.score = HistoryPool(width, fill), mlp(2 * width, 32, 1)

    def forward(self, product: Tensor, history: Tensor) -> Tensor:
        looked = self.products(product)
        pooled = self.pool(looked, self.products(history), history != 0)
        out: Tensor = self.score(torch.cat([looked, pooled.to(looked.dtype)], 1))
        return out[:, 0]


def baskets(batch: int, products: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Products, histories of up to six of one to five sorts, and whether the product is of a sort in them."""
    sort = torch.randint(5, (batch, 1))
    history = 1 + (torch.randint((products - 1) // 5, (batch, 6)) * 5 + sort)
    history = history * (torch.arange(6) < torch.randint(1, 7, (batch, 1)))
    product = torch.randint(1, products, (batch,))
    return product, history, ((product - 1) % 5 == sort[:, 0]).float()


class Coplay(nn.Module):
    """Who likes which song: a product of two embeddings and their biases."""

    def __init__(self, listeners: int = 50, songs: int = 60, width: int = 16) -> None:
        super().__init__()
        self.listeners, self.songs = nn.Embedding(listeners, width), nn.Embedding(songs, width)
        self.fit = nn.Linear(width, 8)
        for table in (self.listeners, self.songs):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, listener: Tensor, song: Tensor) -> Tensor:
        out: Tensor = (self.fit(self.listeners(listener)) * self.fit(self.songs(song))).sum(1)
        return out


class LowRank(nn.Module):
    """A frozen layer and what is learned beside it, in a dtype of its own."""

    def __init__(self, enter: int, leave: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen = nn.Linear(enter, leave).requires_grad_(False)
        self.a = nn.Linear(enter, 6, bias=False, dtype=dtype)
        self.b = nn.Linear(6, leave, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.b(self.a(x))
        return out


class ActorCritic(nn.Module):
    """A policy over four moves and a value, on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(seen)
        return self.policy(shared).float(), self.value(shared).float()[:, 0]

    def losses(self, batch: int = 64) -> tuple[Tensor, Tensor]:
        """Of the policy and of the value, on moves that pay what the state says."""
        seen = torch.randn(batch, 8)
        with half():
            logits, value = self(seen)
        moves = torch.distributions.Categorical(logits=logits)
        move = moves.sample()
        paid = seen.gather(1, move[:, None])[:, 0]
        gain = (paid - value).detach()
        return -(moves.log_prob(move) * gain).mean() - 0.01 * moves.entropy().mean(), F.mse_loss(value, paid)


class Ring(nn.Module):
    """A generator of points on a ring, and what tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(4, 32, 2), mlp(2, 32, 1, deep=2)

    def real(self, batch: int) -> Tensor:
        angle = 2 * math.pi * torch.rand(batch)
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch, 2)

    def told(self, batch: int = 64) -> Tensor:
        """The hinge loss of the discriminator."""
        with half():
            fake = self.generator(torch.randn(batch, 4)).detach()
            of_real, of_fake = self.discriminator(self.real(batch)), self.discriminator(fake)
        return F.relu(1 - of_real.float()).mean() + F.relu(1 + of_fake.float()).mean()

    def fooled(self, batch: int = 64) -> Tensor:
        """The loss of the generator."""
        with half():
            score: Tensor = self.discriminator(self.generator(torch.randn(batch, 4)))
        return -score.float().mean()
