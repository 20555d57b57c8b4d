"""What the fused pass costs on a GPU: against torch's own pass, against a plain copy, and in whole training steps.

    python benchmarks/gpu_pass.py [--pairs 30] [--json]

1. Device time of torch's check-and-unscale, of the fused pass, and of the pass that only reads, for gradients of
   float32 at new addresses at every call; bytes read and written per second beside those of a device copy; and the
   time until the host has launched each.
2. Whole steps of a GPT of 124 M parameters in float16 autocast, plain and watched scaler in alternating blocks.

Without a GPU it measures nothing, says so and exits with 1.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from named_pass import must_have_run
from torch import Tensor, nn
from torch.nn import functional as F

import ampwatch
from ampwatch.stats import fused

DEVICE = "cuda"
REPEATS = 30
ELEMENTS_AND_TENSORS = [
    (10_000_000, 100),
    (10_000_000, 1000),
    (125_000_000, 150),
    (125_000_000, 1000),
    (1_300_000_000, 300),
    (1_300_000_000, 2000),
]
STEPS = 5  # a block
VOCABULARY, CONTEXT, ROWS = 50_304, 1024, 8


def sizes_of(elements: int, tensors: int) -> list[int]:
    """A third of the tensors are vectors, as biases and norms are; of the rest each is up to 16 times another."""
    weights = torch.rand(tensors, generator=torch.Generator().manual_seed(0)).mul(4).exp2()
    weights[::3] = 1e-3
    return [max(1, int(size)) for size in weights / weights.sum() * elements]


def timed(work: Callable[[list[Tensor]], object], gradients: list[list[Tensor]]) -> tuple[float, float]:
    """Median over calls, in turn over sets of gradients: microseconds on the device, and on the host to launch."""
    device, host = [], []
    for i in range(REPEATS + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        started = time.perf_counter()
        work(gradients[i % len(gradients)])
        host.append((time.perf_counter() - started) * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(device[5:]), statistics.median(host[5:])


def pass_row(elements: int, tensors: int) -> dict[str, float]:
    """One line of the table. Two sets of gradients: addresses change from call to call."""
    sizes = sizes_of(elements, tensors)
    gradients = [[torch.randn(size, device=DEVICE) for size in sizes] for _ in range(2)]
    found_inf = torch.zeros(1, device=DEVICE)
    factor = torch.full((1,), 1 + 2.0**-20, device=DEVICE)  # writes, and neither grows nor vanishes
    moved = 8 * sum(sizes)

    torch_us, torch_host = timed(
        lambda grads: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor), gradients
    )
    fused_us, fused_host = timed(
        lambda grads: fused.unscale_with_statistics_(grads, found_inf, factor), gradients
    )
    read_us, _ = timed(fused.statistics_of, gradients)
    flat = torch.empty(sum(sizes), device=DEVICE)
    other = torch.empty_like(flat)
    copy_us, _ = timed(lambda _: other.copy_(flat), gradients)
    return {
        "elements": elements,
        "tensors": tensors,
        "torch_us": torch_us,
        "fused_us": fused_us,
        "fused_over_torch": fused_us / torch_us,
        "read_only_us": read_us,
        "fused_bytes_per_s": moved / fused_us * 1e6,
        "copy_bytes_per_s": moved / copy_us * 1e6,
        "torch_host_us": torch_host,
        "fused_host_us": fused_host,
    }


class Gpt(nn.Module):
    """12 layers of width 768; the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 768), nn.Embedding(CONTEXT, 768)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(768), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight
        return F.linear(self.layers(x, mask=self.mask, is_causal=True), self.embedding.weight)


def block_ms(model: nn.Module, optimizer: torch.optim.Optimizer, scaler, tokens: Tensor) -> float:
    """Milliseconds of one step, over a block."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS * 1e3


def interval(ratios: list[float]) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median."""
    ordered, n = sorted(ratios), len(ratios)
    half = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - half))], ordered[min(n - 1, int(n / 2 + half))]


def whole_step(pairs: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Gpt().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1), device=DEVICE)
    plain = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    with tempfile.TemporaryDirectory() as folder:
        watched = ampwatch.GradScaler(DEVICE, init_scale=1024.0, model=model, dir=folder)
        for scaler in (plain, watched, plain, watched):
            block_ms(model, optimizer, scaler, tokens)
        times = [
            [block_ms(model, optimizer, scaler, tokens) for scaler in (plain, watched)] for _ in range(pairs)
        ]
        ampwatch.finish()
        must_have_run(watched)
    ratios = [ours / theirs for theirs, ours in times]
    low, high = interval(ratios)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plain_ms": statistics.median(theirs for theirs, _ in times),
        "watched_over_plain": statistics.median(ratios),
        "low": low,
        "high": high,
        "pairs": pairs,
    }


def tell(passes: list[dict[str, float]], step: dict[str, float]) -> None:
    """Markdown, for docs/benchmarks.md."""
    print(
        "| elements | tensors | torch, µs | fused, µs | ratio | read only, µs | fused, TB/s | copy, TB/s | host, µs |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in passes:
        print(
            f"| {row['elements'] / 1e6:,.0f} M | {row['tensors']:,} | {row['torch_us']:,.0f} "
            f"| {row['fused_us']:,.0f} | {row['fused_over_torch']:.3f} | {row['read_only_us']:,.0f} "
            f"| {row['fused_bytes_per_s'] / 1e12:.2f} | {row['copy_bytes_per_s'] / 1e12:.2f} "
            f"| {row['fused_host_us']:,.0f} (torch {row['torch_host_us']:,.0f}) |"
        )
    print(
        f"\n{step['parameters'] / 1e6:.0f} M parameters, plain scaler {step['plain_ms']:.1f} ms a step; "
        f"watched / plain: median {step['watched_over_plain']:.4f} (95 % interval {step['low']:.4f} to "
        f"{step['high']:.4f}, {step['pairs']:.0f} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not fused.available():
        sys.exit("No GPU that can run the fused pass: nothing was measured.")
    import triton

    # Whole steps with another implementation would measure nothing: a kernel that fails is raised.
    os.environ |= {"AMPWATCH_STATS": "triton", "AMPWATCH_STRICT": "1"}
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }
    passes = [pass_row(*shape) for shape in ELEMENTS_AND_TENSORS]
    step = whole_step(given.pairs)
    if given.json:
        print(json.dumps({"machine": machine, "passes": passes, "step": step}, indent=1))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine.items()), end="\n\n")
        tell(passes, step)


if __name__ == "__main__":
    main()
