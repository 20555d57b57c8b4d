"""How long our threads hold up the training thread: turns of a busy thread, with a recorder at work and without.

    python benchmarks/stall.py [--seconds 20] [--tensors 1000]

The training thread makes attempts of many tensors, all of which are recorded, and between them takes turns of about
50 microseconds of Python each. A turn that takes longer than the median was held up: by the interpreter's lock, which
another thread of ours has, or by other work on the machine. So the same turns are taken in blocks without attempts,
when our threads have nothing to do, in alternation. The recorder flushes every 50 ms into a folder and to a live server
in a process of its own. Prints the 99th and 99.9th percentile and the longest of what turns took beyond the median.
"""

import argparse
import tempfile
import time

import numpy as np
import torch
from named_pass import must_have_run
from served import server_process

import ampwatch

BLOCK_S = 0.5


def turn() -> None:
    for _ in range(1500):
        pass


def turns(seconds: float) -> list[float]:
    """How long each took, in milliseconds."""
    taken, until = [], time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        turn()
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


class Loop:
    def __init__(self, settings: ampwatch.Settings, tensors: int) -> None:
        self.scaler = ampwatch.GradScaler("cpu", init_scale=1.0, settings=settings)
        self.parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(tensors)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        for parameter in self.parameters:
            parameter.grad = torch.randn(64)

    def attempt(self) -> None:
        self.scaler.scale(torch.ones(()))
        self.scaler.step(self.optimizer)
        self.scaler.update()


def told(name: str, taken: list[float]) -> None:
    late = np.array(taken) - np.median(taken)
    p99, p999 = np.percentile(late, [99, 99.9])
    print(
        f"{name:24} p99 {p99:7.3f} ms, p99.9 {p999:7.3f} ms, longest {late.max():7.3f} ms ({len(late):,} turns)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tensors", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    idle: list[float] = []
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as folder, server_process(folder) as (url, token):
        settings = ampwatch.Settings(
            server=url, token=token, dir=folder, quiet=True, tensor_every=1, flush_s=0.05
        )
        loop = Loop(settings, given.tensors)
        until = time.monotonic() + given.seconds
        while time.monotonic() < until:
            idle += turns(BLOCK_S)
            ends = time.monotonic() + BLOCK_S
            while time.monotonic() < ends:
                loop.attempt()
                busy += turns(0.02)
            time.sleep(0.3)  # our threads have done their work before the next block without
        ampwatch.finish()
        must_have_run(loop.scaler)
    told("without attempts", idle)
    told("with attempts and flushes", busy)


if __name__ == "__main__":
    main()
