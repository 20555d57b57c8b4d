"""Records as a training job sends them: float32 random walks, made once and sent under any number."""

import numpy as np

from ampwatch import records
from ampwatch.records import Batch, Event

EVERY = 25  # attempts between two records of tensors


def shapes(tensors: int) -> np.ndarray:
    """Elements of the tensors of a GPT of width 1024: weights of 1 to 4 M, biases and norms of 1 to 4 k."""
    block = [1024, 1024, 3 * 2**20, 3072, 2**20, 1024, 1024, 1024, 4 * 2**20, 4096, 4 * 2**20, 1024]
    return np.resize(np.array(block), tensors)


def walk(rng: np.random.Generator, n: int, start: float, step: float) -> np.ndarray:
    """A random walk of n steps, in float32."""
    return (start + np.cumsum(rng.normal(0, step, n))).astype(np.float32).astype(np.float64)


def attempts(rng: np.random.Generator, first: int, n: int) -> dict[str, np.ndarray]:
    """20 scalars of n attempts and their keys; every 500th attempt is skipped."""
    at = np.arange(first, first + n)
    skipped = at % 500 == 499
    counts = {f"n_{name}": rng.integers(0, 50_000, n) for name in ("zero", "subnormal", "below")}
    return {
        "attempt": at,
        "stream": np.zeros(n),
        "step": at - at // 500,
        "time": 1.7e9 + at * 0.25,
        "scale": np.where(skipped, 65536.0, 32768.0),
        "scale_after": np.full(n, 32768.0),
        "growth_tracker": at % 500,
        "found_inf": skipped,
        "stepped": np.ones(n),
        "skipped": skipped,
        "losses": np.ones(n),
        "micro_batches": np.ones(n),
        "loss": walk(rng, n, 4.0, 0.01),
        "norm": np.abs(walk(rng, n, 1.0, 0.01)),
        "max_abs": np.abs(walk(rng, n, 100.0, 1.0)),
        "headroom_log2": walk(rng, n, 9.0, 0.01),
        "numel": np.full(n, 124_000_000),
        "n_inf": skipped * 3,
        "n_nan": np.zeros(n),
        "lr": np.full(n, 3e-4),
        **counts,
    }


def tensors(rng: np.random.Generator, recorded: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Rows of all tensors at these attempts, with histograms of log-normal gradients whose middle walks."""
    numel = np.tile(shapes(count), len(recorded))
    middle = np.tile(rng.uniform(-16, -2, count), len(recorded))
    middle = middle + np.repeat(np.cumsum(rng.normal(0, 0.05, len(recorded))), count)
    density = np.exp(-0.5 * ((np.arange(-48, 16) + 0.5 - middle[:, None]) / 3.0) ** 2)
    expected = density / density.sum(axis=1, keepdims=True) * numel[:, None]
    hist = np.maximum(0, np.rint(expected + np.sqrt(expected) * rng.normal(size=expected.shape))).astype(
        np.int64
    )
    hist[:, :24] = 0  # below the smallest float16: lost
    lost = np.maximum(0, numel - hist.sum(axis=1))
    n = len(numel)
    return {
        "attempt": np.repeat(recorded, count),
        "tensor": np.tile(np.arange(count), len(recorded)),
        "scale": np.full(n, 32768.0),
        "numel": numel,
        "n_inf": np.zeros(n),
        "n_nan": np.zeros(n),
        "n_zero": lost,
        "n_subnormal": hist[:, 24:34].sum(axis=1),
        "n_below": lost // 10,
        "n_offgrid": np.zeros(n),
        "n_offgrid_bf16": numel // 2,
        "max_abs": (2.0 ** (middle + 12)).astype(np.float32).astype(np.float64),
        "sum_sq": (4.0**middle * numel).astype(np.float32).astype(np.float64),
        "hist": hist,
    }


def described(count: int) -> list[Event]:
    """The events that introduce a run of so many float16-born tensors."""
    given = [
        {"id": i, "name": f"blocks.{i // 12}.part{i % 12}", "module": f"blocks.{i // 12}", "module_type": "Block",
         "shape": [int(n)], "dtype": "float32", "numel": int(n), "optimizer": 0}
        for i, n in enumerate(shapes(count))
    ]  # fmt: skip
    return [
        Event("run", 1.7e9, data={"project": "benchmark", "name": f"{count} tensors", "world_size": 1}),
        Event("tensors", 1.7e9, data={"tensors": given}),
        Event("origin", 1.7e9, data={"origins": {str(i): "float16" for i in range(count)}}),
    ]


def batch(kind: str, table: dict[str, np.ndarray], seq: int, run: str, producer: str, rank: int = 0) -> Batch:
    """A table as a batch."""
    return records.pack_table(kind, table, producer=producer, seq=seq, run=run, rank=rank)  # type: ignore[arg-type]
