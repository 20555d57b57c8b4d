"""What watching costs: process CPU time of whole training steps, plain and watched scaler in alternating blocks.

    python benchmarks/overhead.py [--pairs 30] [--width 384] [--layers 6]

A 12.2 M-parameter GPT on the CPU in float32 through an enabled scaler (float16 products are up to 100 × slower on
a CPU without native support, which would hide the cost). All threads of the process count, the recorder's and the
server's as well; the server runs in this process and receives every batch. Prints the median of the ratios
watched / plain and its 95 % interval. AMPWATCH_STATS picks the statistics pass; one that fails ends the benchmark.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F

import ampwatch
from ampwatch.guard import failures
from ampwatch_server.serve import running

VOCABULARY = 2048
STEPS = 3  # a block


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


def build(width: int, layers: int) -> nn.Module:
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
    )


def block_seconds(model, optimizer, scaler, tokens) -> float:
    """Process CPU seconds of one step, over a block."""
    started = time.process_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return (time.process_time() - started) / STEPS


def interval(ratios: list[float]) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median."""
    ordered, n = sorted(ratios), len(ratios)
    half = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - half))], ordered[min(n - 1, int(n / 2 + half))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = build(given.width, given.layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(VOCABULARY, (4, 65))
    plain = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with tempfile.TemporaryDirectory() as folder, running(database=f"sqlite:///{folder}/db") as server:
        settings = ampwatch.Settings.load(server=server.url, token=server.token, dir=folder)
        watched = ampwatch.GradScaler("cpu", init_scale=1024.0, model=model, settings=settings)
        for scaler in (plain, watched):
            block_seconds(model, optimizer, scaler, tokens)
        times = [
            (block_seconds(model, optimizer, plain, tokens), block_seconds(model, optimizer, watched, tokens))
            for _ in range(given.pairs)
        ]
        statistics_pass = vars(watched)["_ampwatch"]._pass.name
        ampwatch.finish()
    assert not failures, failures  # another pass would have been measured
    ratios = [ours / theirs for theirs, ours in times]
    low, high = interval(ratios)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    base = statistics.median(theirs for theirs, _ in times) * 1e3
    print(
        f"{size:.1f} M parameters, statistics by {statistics_pass}, plain scaler {base:.0f} ms CPU a step; watched / plain: median "
        f"{statistics.median(ratios):.3f} (95 % interval {low:.3f} to {high:.3f}, {len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
