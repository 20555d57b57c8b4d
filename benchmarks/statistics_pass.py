"""What the statistics pass costs: each implementation against the pass that GradScaler's unscale_ makes anyway.

    python benchmarks/statistics_pass.py [--threads 1]

Best of `REPEATS` for each, on the CPU, over gradients of normal random numbers.
"""

import argparse
import time
from collections.abc import Callable

import torch

from ampwatch.stats.choose import IMPLEMENTATIONS, choose

REPEATS = 15
GRADIENTS = {
    "1 tensor of 64": [64],
    "36 tensors, 0.09 M elements": [64] * 20 + [64 * 64] * 10 + [64 * 128] * 6,
    "1,000 tensors, 0.04 M elements": [37] * 1000,
    "1 tensor, 4.2 M elements": [2**22],
    "74 tensors, 12.6 M elements": [384] * 50 + [384 * 1152] * 12 + [384 * 1536] * 12,
}


def best_us(work: Callable[..., object], *arguments: object) -> float:
    """Shortest of `REPEATS` calls after two to warm up, in microseconds."""
    times = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        work(*arguments)
        times.append(time.perf_counter() - started)
    return min(times[2:]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    found_inf, inverse = torch.zeros(1), torch.ones(1)
    print(f"{'':32}{'unscale_':>12}" + "".join(f"{name:>12}" for name in IMPLEMENTATIONS) + "   us")
    for label, sizes in GRADIENTS.items():
        grads = [torch.randn(n) for n in sizes]
        plain = best_us(torch._amp_foreach_non_finite_check_and_unscale_, grads, found_inf, inverse)
        ours = [best_us(choose(name).compute, grads) for name in IMPLEMENTATIONS]
        print(f"{label:32}{plain:12,.0f}" + "".join(f"{us:12,.0f}" for us in ours))


if __name__ == "__main__":
    main()
