"""Two runs as the batches that they would send: a healthy one, and one whose forward pass overflows at attempt 40."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
import numpy as np

from ampwatch.records import MISSING, Batch, Event, pack_events, pack_table

ATTEMPTS = 60
BREAKS_AT = 40
NAMES = ("embed.weight", "<b>head</b>.weight")  # the second is text that markup would swallow
START = time.time() - ATTEMPTS


def healthy(run: str = "healthy", producer: str = "a" * 32, name: str = "Calm run") -> list[Batch]:
    """60 clean attempts at one scale."""
    rows = [_row(i, scale=65536.0, loss=4.0 - i / 20) for i in range(ATTEMPTS)]
    return _batches(run, producer, _described(name), rows)


def failing(run: str = "failing", producer: str = "b" * 32, name: str = "Broken run") -> list[Batch]:
    """40 clean attempts, then 20 skipped ones with a loss of NaN, the scale halved each time."""
    events, rows, scale = _described(name), [], 65536.0
    for i in range(ATTEMPTS):
        broken = i >= BREAKS_AT
        rows.append(_row(i, scale=scale, loss=math.nan if broken else 4.0 - i / 20, broken=broken))
        if broken:
            events += _skipped(i, scale)
            scale /= 2
    return _batches(run, producer, events, rows)


def of_rank(batch: Batch, rank: int) -> Batch:
    """The same as another rank would send it."""
    return msgspec.structs.replace(batch, rank=rank)


def _described(name: str) -> list[Event]:
    tensors = [_tensor(i, tensor) for i, tensor in enumerate(NAMES)]
    optimizer = {
        "id": 0,
        "class": "AdamW",
        "fused": False,
        "lr": [1e-3],
        "eps": 1e-8,
        "numel": 8192,
        "tensors": 2,
    }
    scaler = {"scaler": 0, "class": "GradScaler", "policy": "torch", "enabled": True, "device": "cpu"}
    scaler |= {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "replaces": None,
    }
    about = {
        "project": "tests",
        "name": name,
        "tags": ["e2e"],
        "config": {"width": 64},
        "world_size": 1,
        "host": "node-1",
    }
    about |= {
        "pid": 1,
        "device": "cpu",
        "versions": {"torch": "2.13.0"},
        "statistics": "reference",
        "settings": {},
    }
    described = {
        "run": about,
        "scaler": scaler,
        "stream": {"stream": 0, "scaler": 0, "optimizers": [0]},
        "optimizers": {"optimizers": [optimizer]},
        "tensors": {"tensors": tensors},
        "origin": {"origins": {"0": "float16", "1": "float16"}},
    }
    return [Event(kind, START, data=data) for kind, data in described.items()]


def _tensor(number: int, name: str) -> dict[str, Any]:
    module = name.removesuffix(".weight")
    about = {"module": module, "module_type": "Linear", "shape": [64, 64], "dtype": "float32"}
    return {"id": number, "name": name, "numel": 4096, "optimizer": 0} | about


def _skipped(attempt: int, scale: float) -> list[Event]:
    at = {"time": START + attempt, "attempt": attempt, "step": BREAKS_AT, "stream": 0}
    changed = {"scale": scale, "scale_after": scale / 2}
    met = {"optimizers": [0], "loss": math.nan, "n_inf": 0, "n_nan": 8192, "tensors": [0, 1], "count": 2}
    return [Event("skip", data=changed | met, **at), Event("backoff", data=changed, **at)]


def _row(attempt: int, *, scale: float, loss: float, broken: bool = False) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "stream": 0,
        "step": min(attempt, BREAKS_AT) if broken else attempt,
        "time": START + attempt,
        "scale": scale,
        "scale_after": scale / 2 if broken else scale,
        "growth_tracker": 0 if broken else attempt + 1,
        "found_inf": broken,
        "stepped": 1,
        "skipped": int(broken),
        "losses": 1,
        "micro_batches": 1,
        "loss": loss,
        "norm": MISSING if broken else 1.0 + 1 / (attempt + 1),
        "max_abs": 0.0 if broken else 512.0,
        "headroom_log2": MISSING if broken else 7.0,
        "numel": 8192,
        "n_inf": 0,
        "n_nan": 8192 if broken else 0,
        "n_zero": 0,
        "n_subnormal": 0,
        "n_below": 0,
        "lr": 1e-3,
        "applied_nonfinite": False,
    }


def _tensor_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    hist = np.zeros(64, dtype=np.int64)
    hist[50:54] = 1024
    same = {"stream": 0, "numel": 4096, "n_inf": 0, "n_zero": 0, "n_subnormal": 0, "n_below": 0}
    same |= {"n_offgrid": 0, "n_offgrid_bf16": 4000, "sum_sq": 1.0e6}
    return [
        same
        | {"attempt": row["attempt"], "tensor": tensor, "scale": row["scale"], "max_abs": row["max_abs"]}
        | {"n_nan": 4096 if row["found_inf"] else 0, "hist": hist * (not row["found_inf"])}
        for row in rows[::10]
        for tensor in range(len(NAMES))
    ]


def _batches(run: str, producer: str, events: list[Event], rows: list[dict[str, Any]]) -> list[Batch]:
    header = {"producer": producer, "run": run, "rank": 0}
    return [
        pack_events(events, seq=0, **header),
        pack_table("attempts", _columns(rows), seq=1, **header),
        pack_table("tensors", _columns(_tensor_rows(rows)), seq=2, **header),
    ]


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
