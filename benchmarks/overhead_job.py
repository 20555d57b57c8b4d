"""The training job that overhead.py measures: one process, told by lines on its input to take a pair of blocks.

    python overhead_job.py ours|nothing|norms|hooks|tensorboard|wandb|trainscope

A 12.2 M-parameter GPT on the CPU in float32 through an enabled scaler (float16 products are up to 100 × slower on a
CPU without native support, which would hide the cost). For each line it reads it trains a block without the monitor
and one with it, and prints their CPU seconds, all threads of the process, as JSON. What ampwatch's own threads have
taken is told apart, as they do their work later, perhaps while a block without it runs.
"""

# ruff: noqa: ARG002 - a monitor is given what some of them need

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, VOCABULARY = 384, 6, 2048


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, context, 3, 6, width // 6).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gpt() -> nn.Module:
    blocks = [Block(WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


class Monitor:
    """Looks at the gradients of a step once they are unscaled; this one does not."""

    steps = 1  # of a block

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        self.model, self.folder = model, folder
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def on(self) -> None: ...
    def off(self) -> None: ...
    def step(self, number: int, loss: float) -> None: ...


class Ours(Monitor):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        import ampwatch

        super().__init__(model, optimizer, folder)
        settings = ampwatch.Settings.load(dir=folder)
        self.plain = self.scaler
        self.watched = ampwatch.GradScaler("cpu", init_scale=1024.0, model=model, settings=settings)

    def on(self) -> None:
        self.scaler = self.watched

    def off(self) -> None:
        self.scaler = self.plain


class Norms(Monitor):
    def step(self, number: int, loss: float) -> None:
        {name: p.grad.norm().item() for name, p in self.model.named_parameters()}


class Hooks(Monitor):
    """A hook on each parameter counts NaN, inf and zeros, read once a step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        super().__init__(model, optimizer, folder)
        self.is_on, self.counts = False, {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name: self.count(name, grad))

    def count(self, name: str, grad: torch.Tensor) -> None:
        if self.is_on:
            self.counts[name] = [torch.isnan(grad).sum(), torch.isinf(grad).sum(), (grad == 0).sum()]

    def on(self) -> None:
        self.is_on = True

    def off(self) -> None:
        self.is_on = False

    def step(self, number: int, loss: float) -> None:
        [count.item() for counts in self.counts.values() for count in counts]


class TensorBoard(Monitor):
    steps = 3

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(model, optimizer, folder)
        self.writer = SummaryWriter(folder)

    def step(self, number: int, loss: float) -> None:
        for name, parameter in self.model.named_parameters():
            self.writer.add_histogram(name, parameter.grad, number)
        self.writer.add_scalar("scale", self.scaler.get_scale(), number)


class Wandb(Monitor):
    steps = 3

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        import wandb

        super().__init__(model, optimizer, folder)
        self.wandb, self.run = wandb, wandb.init(project="overhead", dir=folder)

    def on(self) -> None:
        self.wandb.watch(self.model, log="gradients", log_freq=1)

    def off(self) -> None:
        self.wandb.unwatch(self.model)

    def step(self, number: int, loss: float) -> None:
        self.run.log({"loss": loss})


class TrainScope(Monitor):
    steps = 3

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
        from trainscope import TrainScope as Scope
        from trainscope.core.config import TrainScopeConfig

        super().__init__(model, optimizer, folder)
        self.scope, self.is_attached = Scope(model, optimizer, config=TrainScopeConfig()), False

    def on(self) -> None:
        if not self.is_attached:
            self.is_attached = True
            self.scope.attach()

    def step(self, number: int, loss: float) -> None:
        self.scope.step(loss, batch_index=number)


MONITORS = {
    "ours": Ours,
    "nothing": Monitor,
    "norms": Norms,
    "hooks": Hooks,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trainscope": TrainScope,
}


def background_s() -> float:
    """CPU seconds of ampwatch's own threads so far."""
    ids = [each.native_id for each in threading.enumerate() if each.name.startswith("ampwatch")]
    return sum(int(Path(f"/proc/self/task/{i}/schedstat").read_text().split()[0]) for i in ids) / 1e9


class Job:
    def __init__(self, name: str, folder: str) -> None:
        torch.manual_seed(0)
        self.model = gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.tokens = torch.randint(VOCABULARY, (4, 65))
        self.monitor = MONITORS[name](self.model, self.optimizer, folder)
        self.number = 0

    def block_s(self, watched: bool) -> float:
        """CPU seconds of a step, without those of our own threads."""
        started, in_background = time.process_time(), background_s()
        for _ in range(self.monitor.steps):
            self.step(watched)
        taken = time.process_time() - started - (background_s() - in_background)
        return taken / self.monitor.steps

    def step(self, watched: bool) -> None:
        scaler, self.number = self.monitor.scaler, self.number + 1
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, self.tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        value = loss.item()
        if watched and not isinstance(self.monitor, Ours):
            scaler.unscale_(self.optimizer)
            self.monitor.step(self.number, value)
        scaler.step(self.optimizer)
        scaler.update()

    def pair(self) -> dict[str, float]:
        self.monitor.off()
        plain = self.block_s(watched=False)
        self.monitor.on()
        watched = self.block_s(watched=True)
        return {"plain": plain, "watched": watched, "background": background_s(), "steps": self.monitor.steps}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        job = Job(sys.argv[1], folder)
        job.pair()
        for _ in sys.stdin:
            print("pair", json.dumps(job.pair()), flush=True)
        os.chdir("/")
        if isinstance(job.monitor, Ours):
            from named_pass import must_have_run

            import ampwatch

            ampwatch.finish()
            must_have_run(job.monitor.watched)


if __name__ == "__main__":
    main()
