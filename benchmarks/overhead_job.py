"""The training job that overhead.py measures: one process, told by lines on its input what to measure.

    python overhead_job.py ours|nothing|norms|hooks|tensorboard|wandb|trainscope

A 12.2 M-parameter GPT on the CPU in float32 through an enabled scaler (float16 products are up to 100 × slower on a
CPU without native support, which would hide the cost), twice: the monitor sees one of them, and leaves nothing in the
other, no hook either. For each line `pair` it trains a block of the one without and one of the other, and prints their
CPU seconds, all threads of the process, as JSON. What ampwatch's own threads take is told apart, as they do their work
later, perhaps while a block without it runs; and what that is a step is measured after a line `stretch SECONDS`, in
which every step is watched.
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
FLUSHED_S = 1.5  # after which what was recorded has been written


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


class Training:
    """A model with its optimizer and its scaler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = gpt()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.tokens = torch.randint(VOCABULARY, (4, 65))

    def step(self, monitor: "Monitor | None") -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, self.tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        value = loss.item()
        if monitor is not None and monitor.wants_true_gradients:
            self.scaler.unscale_(self.optimizer)
            monitor.step(value)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Monitor:
    """Looks at the gradients of a step once they are unscaled; this one does not."""

    steps = 1  # of a block
    wants_true_gradients = True

    def __init__(self, training: Training, folder: str) -> None:
        self.training, self.model, self.folder = training, training.model, folder
        self.number = 0

    def step(self, loss: float) -> None:
        self.number += 1


class Ours(Monitor):
    wants_true_gradients = False

    def __init__(self, training: Training, folder: str) -> None:
        import ampwatch

        super().__init__(training, folder)
        settings = ampwatch.Settings.load(dir=folder)
        self.scaler = ampwatch.GradScaler("cpu", init_scale=1024.0, model=training.model, settings=settings)
        training.scaler = self.scaler


class Norms(Monitor):
    def step(self, loss: float) -> None:
        {name: p.grad.norm().item() for name, p in self.model.named_parameters()}


class Hooks(Monitor):
    """A hook on each parameter counts NaN, inf and zeros, read once a step."""

    def __init__(self, training: Training, folder: str) -> None:
        super().__init__(training, folder)
        self.counts = {}
        for name, parameter in self.model.named_parameters():
            parameter.register_hook(lambda grad, name=name: self.count(name, grad))

    def count(self, name: str, grad: torch.Tensor) -> None:
        self.counts[name] = [torch.isnan(grad).sum(), torch.isinf(grad).sum(), (grad == 0).sum()]

    def step(self, loss: float) -> None:
        [count.item() for counts in self.counts.values() for count in counts]


class TensorBoard(Monitor):
    steps = 3

    def __init__(self, training: Training, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(training, folder)
        self.writer = SummaryWriter(folder)

    def step(self, loss: float) -> None:
        super().step(loss)
        for name, parameter in self.model.named_parameters():
            self.writer.add_histogram(name, parameter.grad, self.number)
        self.writer.add_scalar("scale", self.training.scaler.get_scale(), self.number)


class Wandb(Monitor):
    steps = 3

    def __init__(self, training: Training, folder: str) -> None:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        import wandb

        super().__init__(training, folder)
        self.run = wandb.init(project="overhead", dir=folder)
        wandb.watch(self.model, log="gradients", log_freq=1)

    def step(self, loss: float) -> None:
        self.run.log({"loss": loss})


class TrainScope(Monitor):
    steps = 3

    def __init__(self, training: Training, folder: str) -> None:
        from trainscope import TrainScope as Scope
        from trainscope.core.config import TrainScopeConfig

        super().__init__(training, folder)
        self.scope = Scope(self.model, training.optimizer, config=TrainScopeConfig())
        self.scope.attach()

    def step(self, loss: float) -> None:
        super().step(loss)
        self.scope.step(loss, batch_index=self.number)


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
        self.plain, self.watched = Training(), Training()
        self.monitor = MONITORS[name](self.watched, folder)

    def block_s(self, training: Training, monitor: Monitor | None) -> float:
        """CPU seconds of a step, without those of our own threads."""
        started, in_background = time.process_time(), background_s()
        for _ in range(self.monitor.steps):
            training.step(monitor)
        taken = time.process_time() - started - (background_s() - in_background)
        return taken / self.monitor.steps

    def pair(self) -> dict[str, float]:
        return {"plain": self.block_s(self.plain, None), "watched": self.block_s(self.watched, self.monitor)}

    def stretch(self, seconds: float) -> dict[str, float]:
        """CPU seconds a step of our own threads, over watched steps alone."""
        until, started, steps = time.monotonic() + seconds, background_s(), 0
        while time.monotonic() < until or not steps:
            self.watched.step(self.monitor)
            steps += 1
        time.sleep(FLUSHED_S)
        return {"background": (background_s() - started) / steps}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        job = Job(sys.argv[1], folder)
        job.pair()
        for line in sys.stdin:
            what, *seconds = line.split()
            told = job.stretch(float(seconds[0])) if what == "stretch" else job.pair()
            print("measured", json.dumps(told), flush=True)
        os.chdir("/")
        if isinstance(job.monitor, Ours):
            from named_pass import must_have_run

            import ampwatch

            ampwatch.finish()
            must_have_run(job.monitor.scaler)


if __name__ == "__main__":
    main()
