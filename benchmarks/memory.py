"""What memory watching takes, and whether it stays flat: a training process over many attempts, with a server and without.

    python benchmarks/memory.py [--attempts 10000] [--tensors 74]

One process trains with torch's scaler first, then with ours, at default settings. The gradients are there already, so
that attempts are quick; every 500th overflows. The server runs in a process of its own. Memory is measured after a
fifth of the attempts, by when every buffer is as large as it gets, and at the end.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from served import server_process

import ampwatch


def resident_mib() -> float:
    """Of the process itself: pages of libraries, which the kernel takes back as it likes, are left out."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 2**10


def watched(settings: ampwatch.Settings) -> torch.amp.GradScaler:
    return ampwatch.GradScaler("cpu", init_scale=2.0**16, growth_interval=499, settings=settings)


def train(scaler: torch.amp.GradScaler, attempts: int, tensors: int) -> tuple[float, float]:
    """Resident MiB after a fifth of the attempts, and at the end."""
    parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(tensors)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    loss, gradient, early = torch.ones(()), torch.randn(64), 0.0
    for attempt in range(attempts):
        scaler.scale(loss)
        for parameter in parameters:
            parameter.grad = gradient.clone()
        if attempt % 500 == 499:
            parameters[0].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        early = resident_mib() if attempt == attempts // 5 else early
    late = resident_mib()
    ampwatch.finish()
    return early, late


def report(name: str, early: float, late: float) -> None:
    print(
        f"{name:16} {early:8.1f} MiB after a fifth, {late:8.1f} MiB at the end: {late - early:+.1f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=74)
    given = parser.parse_args()
    torch.set_num_threads(1)
    plain = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=499)
    report("torch's scaler", *train(plain, given.attempts, given.tensors))
    with tempfile.TemporaryDirectory() as folder:
        scaler = watched(ampwatch.Settings(dir=folder))
        report("without a server", *train(scaler, given.attempts, given.tensors))
    with tempfile.TemporaryDirectory() as folder, server_process(folder) as (url, token):
        scaler = watched(ampwatch.Settings(server=url, token=token, dir=folder))
        report("with a server", *train(scaler, given.attempts, given.tensors))


if __name__ == "__main__":
    main()
