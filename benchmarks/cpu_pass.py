"""What the statistics cost on the CPU: torch's unscale pass, the kernel that has it in it, and the reference.

    python benchmarks/cpu_pass.py [--threads 1 2] [--dtypes float32 …] [--rounds 21] [--alone SECONDS]

Each round calls all of them, one after another, on the same gradients; medians and shortest, and the ratio of each
to torch's pass. With one thread it is CPU time of that thread, which other processes do not lengthen but by what they
take of caches and memory; with more it is time by the clock. With --alone only rounds count in which nothing else ran
on the machine (Linux), for so many seconds a row of gradients; it leaves out what takes long. Half of the gradients are float16-born, as those of linear layers under autocast are. Every
instruction set of this processor is measured, against one torch: `ATEN_CPU_CAPABILITY=avx2` or `default` holds that
back as well.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ampwatch.stats import cpu, reference

Pass = Callable[[], object]
GRADIENTS = {  # GPTs of six and of twelve layers, and many small tensors
    "80, 12.2 M": [384] * 55 + [384 * 384] * 6 + [384 * 1152] * 6 + [384 * 1536] * 12 + [384 * 4000],
    "272, 85 M": [768] * 224 + [768 * 768] * 12 + [768 * 2304] * 12 + [768 * 3072] * 24,
    "1,000 of 384": [384] * 1000,
    "5,000 of 37": [37] * 5000,
    "2, in cache": [384 * 384] * 2,  # which gradients of a step are not
}
SLOW = ("reference",)
SLOW_ROUNDS = 3


def gradients(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    made = [torch.randn(size) * 1e-3 for size in sizes]
    return [(grad.half().float() if i % 2 else grad).to(dtype) for i, grad in enumerate(made)]


def passes(grads: list[Tensor]) -> dict[str, Pass]:
    found_inf, inv_scale = torch.zeros(1), torch.full((1,), 1.0000001)  # by 1 nobody would multiply
    made: dict[str, Pass] = {
        "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    }
    best = cpu.INSTRUCTIONS.index(cpu.best_instructions())
    for name in reversed(cpu.INSTRUCTIONS[: best + 1]):
        made[name] = lambda name=name: cpu.unscale_with_statistics_(
            grads, found_inf, inv_scale, instructions=name
        )
    made["read only"] = lambda: cpu.statistics_of(grads)
    made["reference"] = lambda: reference.statistics_of(grads)
    return made


def measure(passes: dict[str, Pass], rounds: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds + 1):
        for name, work in passes.items():
            if name not in SLOW or number <= SLOW_ROUNDS:
                times[name].append(timed_ms(work, threads))
    return {name: taken[1:] for name, taken in times.items()}


def measure_alone(
    passes: dict[str, Pass], rounds: int, threads: int, seconds: float
) -> dict[str, list[float]]:
    """As `measure`, of rounds in which no more was running than what is measured."""
    times: dict[str, list[float]] = {name: [] for name in passes if name not in SLOW}
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(times["torch"]) < rounds:
        taken = {}
        for name in times:
            taken[name] = timed_ms(passes[name], threads)
            if running() > threads:
                break
        else:
            for name, ms in taken.items():
                times[name].append(ms)
    return times


def running() -> int:
    """Threads of the whole machine that are running or ready to."""
    words = Path("/proc/stat").read_text().split()
    return int(words[words.index("procs_running") + 1])


def timed_ms(work: Pass, threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    started = clock()
    work()
    return (clock() - started) * 1e3


def table(label: str, times: dict[str, list[float]]) -> None:
    plain = times["torch"]
    if not plain:
        print(f"{label:14} no round without other work on the machine")
        return
    for name, taken in times.items():
        median, shortest = statistics.median(taken), min(taken)
        print(
            f"{label:14} {name:10} {median:10.2f} {median / statistics.median(plain):7.2f}"
            f" {shortest:12.2f} {shortest / min(plain):7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--alone", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    if not cpu.available():
        parser.error("the kernel was not built here")
    print(
        f"torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}, {cpu.best_instructions()} here"
    )
    for threads, dtype in product(arguments.threads, arguments.dtypes):
        torch.set_num_threads(threads)
        print(
            f"\n{f'{threads} threads, {dtype}':25} {'median ms':>10} {'ratio':>7} {'shortest ms':>12} {'ratio':>7}"
        )
        for label, sizes in GRADIENTS.items():
            made = passes(gradients(sizes, getattr(torch, dtype)))
            if arguments.alone:
                table(label, measure_alone(made, arguments.rounds, threads, arguments.alone))
            else:
                table(label, measure(made, arguments.rounds, threads))


if __name__ == "__main__":
    main()
