"""Host time per attempt: ours minus torch's over scale, unscale_, step and update of 1,000 small gradients, on the CPU.

CPU time of the training thread, which other processes on the machine do not lengthen.

    python benchmarks/host_time.py [--tensors 1000] [--attempts 400] [--with-pass]

The statistics pass is left out unless it is asked for (benchmarks/cpu_pass.py measures it), as it is on a GPU, where
the device makes it: numbers made once stand in for its result, torch's own op unscales, and all that follows from them
is done. A backward pass of one parameter stands for that of a model, whose time says nothing here: it is the one that
hooks are on. Both scalers step an optimizer that does nothing. One attempt of each scaler in turn; the recorder writes
to a temporary folder all the while. Prints medians, the 95 % interval of the difference, and the
shortest attempt of each.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
from named_pass import must_have_run

import ampwatch
from ampwatch.guard import failures
from ampwatch.stats.choose import Statistics, choose
from ampwatch.unscaling import Pass

WARM_UP = 100  # attempts: past the first 64, whose tensors are all recorded


class Still(torch.optim.SGD):
    """Leaves the weights alone, so that only the scaler is timed."""

    def step(self, closure=None) -> None:
        pass


class Loop:
    """A training loop whose gradients are there already, but for that of the first parameter."""

    def __init__(self, scaler: torch.amp.GradScaler, tensors: int) -> None:
        self.scaler = scaler
        parameters = [torch.nn.Parameter(torch.zeros(32)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn(32)
        self.first = parameters[0]
        self.optimizer = Still(parameters, lr=0.0)

    def attempt_us(self) -> float:
        self.first.grad = None
        loss = self.first.sum()
        started = time.thread_time()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return (time.thread_time() - started) * 1e6


def without_pass(scaler: ampwatch.GradScaler, tensors: int) -> None:
    rows = choose().compute([torch.randn(32) for _ in range(tensors)])

    def unscale(grads: Sequence[torch.Tensor], *factors: torch.Tensor) -> torch.Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), *factors)
        return rows

    watched = vars(scaler)["_ampwatch"]
    watched._pass = Pass(Statistics("none", lambda _: rows, unscale), watched.recorder)


def interval(values: list[float]) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median."""
    ordered, n = sorted(values), len(values)
    half = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - half))], ordered[min(n - 1, int(n / 2 + half))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=400)
    parser.add_argument("--with-pass", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = ampwatch.Settings(dir=folder, quiet=True)
        watched = ampwatch.GradScaler("cpu", init_scale=1.0, settings=settings)
        theirs, ours = (
            Loop(scaler, given.tensors) for scaler in (torch.amp.GradScaler("cpu", init_scale=1.0), watched)
        )
        ours.attempt_us()  # in which it chooses its pass
        must_have_run(watched)
        if not given.with_pass:
            without_pass(watched, given.tensors)
        for _ in range(WARM_UP):
            theirs.attempt_us(), ours.attempt_us()
        pairs = [(theirs.attempt_us(), ours.attempt_us()) for _ in range(given.attempts)]
        ampwatch.finish()
        if given.with_pass:
            must_have_run(watched)
        assert not failures, failures
    added = [mine - plain for plain, mine in pairs]
    low, high = interval(added)
    shortest = [min(times) for times in zip(*pairs, strict=True)]
    print(
        f"{given.tensors:,} tensors: torch {statistics.median(plain for plain, _ in pairs):,.0f} us an attempt, "
        f"ours adds {statistics.median(added):,.0f} us (95 % interval {low:,.0f} to {high:,.0f}, {len(added)} pairs); "
        f"shortest {shortest[0]:,.0f} and {shortest[1]:,.0f} us"
    )


if __name__ == "__main__":
    main()
