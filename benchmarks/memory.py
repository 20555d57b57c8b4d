"""What memory watching takes, and whether it stays flat: a training process over many attempts, with a server or without.

    python benchmarks/memory.py [--attempts 40000] [--tensors 74] [--server]

A process trains with torch's scaler first, then with ours, at default settings; a second would find what the first has
left. The gradients are there already, so that attempts are quick; every 500th overflows. The server has its own process. Memory is measured after 2,000
attempts, by when every buffer is as large as it gets, after 10,000 and at the end, and once more when the run is over.
It ends with 1 where ours takes more than `BUDGET_MIB` beyond torch's, or grows by more than `NOISE_MIB` after the first
measurement.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from named_pass import must_have_run
from served import server_process

import ampwatch

AFTER = (2_000, 10_000)
BUDGET_MIB, NOISE_MIB = 64.0, 8.0


def resident_mib() -> float:
    """Of the process itself: pages of libraries, which the kernel takes back as it likes, are left out."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 2**10


def watched(settings: ampwatch.Settings) -> torch.amp.GradScaler:
    return ampwatch.GradScaler("cpu", init_scale=2.0**16, growth_interval=499, settings=settings)


def train(scaler: torch.amp.GradScaler, attempts: int, tensors: int) -> list[float]:
    """Resident MiB after 2,000 and 10,000 attempts, at the end, and when the run is over."""
    parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(tensors)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    loss, gradient, seen = torch.ones(()), torch.randn(64), []
    for attempt in range(1, attempts + 1):
        scaler.scale(loss)
        for parameter in parameters:
            parameter.grad = gradient.clone()
        if attempt % 500 == 0:
            parameters[0].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if attempt in (*AFTER, attempts):
            seen.append(resident_mib())
    ampwatch.finish()
    if isinstance(scaler, ampwatch.GradScaler):
        must_have_run(scaler)
    return [*seen, resident_mib()]


def report(name: str, seen: list[float], torchs: float) -> bool:
    """Print a line; whether it is within the budget, and flat."""
    beyond = [mib - torchs for mib in seen]
    print(f"{name:18}" + "".join(f"{mib:+10.1f}" for mib in beyond), flush=True)
    return max(beyond) <= BUDGET_MIB and max(beyond) - beyond[0] <= NOISE_MIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, default=40_000)
    parser.add_argument("--tensors", type=int, default=74)
    parser.add_argument("--server", action="store_true", help="send to one, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plain = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=499)
    torchs = max(train(plain, given.attempts, given.tensors))
    print(f"MiB beyond torch's {torchs:.1f}, {given.tensors} tensors")
    print(f"{'attempts':18}" + "".join(f"{n:>10,}" for n in (*AFTER, given.attempts)) + "      over")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url, token = stack.enter_context(server_process(folder)) if given.server else (None, None)
        scaler = watched(ampwatch.Settings(dir=folder, server=url, token=token))
        seen = train(scaler, given.attempts, given.tensors)
    good = report("with a server" if given.server else "without a server", seen, torchs)
    sys.exit(not good)


if __name__ == "__main__":
    main()
