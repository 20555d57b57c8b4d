"""What a replay costs: 200 settings over a run of a million attempts, in process CPU time.

python benchmarks/replay.py [--attempts 1000000] [--repeats 5]
"""

import argparse
import itertools
import statistics
import time

import numpy as np

from ampwatch.replay.policies import Torch
from ampwatch.replay.simulate import simulate

INITS = (2.0**10, 2.0**14, 2.0**16, 2.0**20, 2.0**24)
FACTORS = (2.0, 2.0**0.5, 1.2, 4.0)
INTERVALS = (500, 1000, 1500, 2000, 3000, 4000, 5000, 7000, 10_000, 20_000)
SHORT = (100, 120, 150, 200, 250, 300, 350, 400, 450, 499)


def ceilings(attempts):
    """A ceiling that drifts over some binades, with the heavy tail that single batches give it."""
    rng = np.random.default_rng(0)
    drift = np.cumsum(rng.normal(0, 0.003, attempts))
    return 2.0 ** (18 + drift + 0.3 * rng.standard_t(3, attempts))


def measured(ceiling, intervals):
    started, changes = time.process_time(), 0
    for init, factor, interval in itertools.product(INITS, FACTORS, intervals):
        changes += len(simulate(Torch(init, factor, 0.5, interval), ceiling).at)
    return time.process_time() - started, changes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    ceiling = ceilings(asked.attempts)
    for name, intervals in (("growth every 500 to 20,000", INTERVALS), ("growth every 100 to 499", SHORT)):
        times, changes = zip(*(measured(ceiling, intervals) for _ in range(asked.repeats)), strict=True)
        print(
            f"200 settings, {name}: {statistics.median(times):.2f} s CPU ({min(times):.2f} to {max(times):.2f}), "
            f"{changes[0]:,} changes of scale"
        )


if __name__ == "__main__":
    main()
