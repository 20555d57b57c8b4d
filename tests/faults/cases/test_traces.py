"""What people have reported, as the traces that their logs would have given: scale, loss and norm, attempt by attempt.

Each is named by what happened. The numbers are of the sizes that were reported; the paths follow the policy named.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ampwatch.diagnosis import diagnose

NAN = math.nan


class Part(NamedTuple):
    """Attempts in a row: how many, whether skipped, and from which loss and norm to which, on a log scale."""

    attempts: int
    skipped: bool = False
    loss: tuple[float, float] = (1.0, 1.0)
    norm: tuple[float, float] = (1.0, 1.0)


def clean(n: int, loss: Any = (1.0, 1.0), norm: Any = (1.1, 0.9)) -> Part:
    return Part(n, False, loss, norm)


def skip(n: int, loss: Any = (1.0, 1.0)) -> Part:
    return Part(n, True, loss, (NAN, NAN))


class Scaler(NamedTuple):
    """A policy, as far as these traces go through it."""

    name: str = "torch"
    init: float = 2.0**16
    interval: int = 2000
    hysteresis: int = 1
    floor: float = 0.0


def rows(parts: list[Part], scaler: Scaler, **more: Any) -> list[dict[str, Any]]:
    """The attempts of all parts; `more` are columns, by attempt."""
    found: list[dict[str, Any]] = []
    scale, left, tracker = scaler.init, scaler.hysteresis, 0
    for part in parts:
        for i in range(part.attempts):
            at = i / max(part.attempts - 1, 1)
            loss, norm = (
                a if a == b or math.isnan(a) else a * (b / a) ** at for a, b in (part.loss, part.norm)
            )
            row = {"attempt": len(found), "scale": scale, "found_inf": int(part.skipped), "loss": loss}
            found.append(row | {"grad_norm": norm} | {k: v[len(found)] for k, v in more.items()})
            if part.skipped:
                left, tracker = left - 1, 0
                scale = max(scale / 2, scaler.floor) if left <= 0 else scale
            else:
                tracker += 1
                if tracker == scaler.interval:
                    scale, left, tracker = scale * 2, scaler.hysteresis, 0
            found[-1]["scale_after"] = scale
    return found


def said(path: Path, attempts: list[dict[str, Any]], policy: str = "torch") -> list[tuple[str, str]]:
    """(kind, severity) of what a person is told of the trace, info last."""
    with (path / "trace.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(attempts[0]))
        writer.writeheader()
        writer.writerows(attempts)
    return [(f.kind, f.severity) for f in diagnose(path / "trace.csv", policy)]


TORCH, LONG = Scaler(), Scaler(init=2.0**32)
ZERO = Scaler("deepspeed", interval=1000, hysteresis=2, floor=1.0)
FUSED16 = Scaler("deepspeed-fp16", init=2.0**32, interval=1000, floor=1.0)
FAIRSEQ = Scaler("fairseq", init=128.0, floor=1e-4)
KERAS = Scaler("keras2", init=2.0**15, floor=1.0)
APEX = Scaler("apex")
COLOSSAL = Scaler("colossalai", interval=1000, hysteresis=2, floor=1.0)
MEGATRON = Scaler("megatron", init=2.0**32, interval=1000, hysteresis=2, floor=1.0)

TRACES: dict[str, tuple[Scaler, list[Part], list[tuple[str, str]]]] = {
    "an epoch at the ceiling, then one probe above it": (
        Scaler(init=2.0**20, interval=500),
        [clean(500, (0.9, 0.685), (0.1, 0.095)), skip(1, (0.685, 0.685)), clean(300, (0.685, 0.68))],
        [("growth_probe", "info")],
    ),
    "six binades above the ceiling, at a minute a step": (
        FUSED16,
        [skip(6), clean(80, (4.0, 3.0))],
        [("calibration", "info")],
    ),
    "calibration, then a probe that costs two skips by hysteresis": (
        ZERO,
        [skip(6), clean(494), skip(2), clean(400)],
        [("growth_probe", "info"), ("calibration", "info")],
    ),
    "a window that ends in a probe, over and over": (
        Scaler("deepspeed", init=4096.0, interval=1000, hysteresis=2, floor=1.0),
        [clean(1000), *[skip(2), clean(1000)] * 6],
        [("growth_probe", "info")],
    ),
    "one skip in two thousand steps": (
        TORCH,
        [clean(2000), *[skip(1), clean(2000)] * 5],
        [("growth_probe", "info")],
    ),
    "a large transformer whose loss doubles before it overflows for good": (
        FAIRSEQ,
        [clean(900, (7.0, 4.0), (0.9, 0.39)), clean(60, (4.0, 60.0), (0.39, 30.0)), skip(12, (60.0, 70.0))],
        [("divergence", "fatal")],
    ),
    "a rate of 1e-3 that explodes": (
        FAIRSEQ,
        [clean(400, (9.0, 6.0), (2.0, 1.0)), clean(40, (6.0, 90.0), (1.0, 80.0)), skip(15, (90.0, 90.0))],
        [("divergence", "fatal")],
    ),
    "a sum over all tokens that brings the scale below 1": (
        FAIRSEQ,
        [skip(18, (9.8, 9.8)), clean(300, (9.8, 9.0), (55.0, 60.0))],
        [("summed_loss", "info"), ("calibration", "info")],
    ),
    "low-rank fine-tuning that falls from 64 to 1 and stays there": (
        Scaler("deepspeed", init=64.0, interval=1000, hysteresis=1, floor=1.0),
        [clean(140, (3.0, 1.67)), skip(18, (2.0, 2.1))],
        [("scale_floor", "fatal")],
    ),
    "a floor of 1 at which every step is skipped": (
        KERAS,
        [clean(50, (2.0, 1.5)), skip(40, (1.5, 1.5))],
        [("scale_floor", "fatal")],
    ),
    "a loss that is NaN for ever, down to where the scale ends": (
        APEX,
        [clean(100), skip(200, (NAN, NAN))],
        [("dead_zone", "fatal")],
    ),
    "a custom loss that overflows, and no message at all": (
        TORCH,
        [clean(30), skip(5, (NAN, NAN))],
        [("nonfinite_forward", "fatal")],
    ),
    "every loss NaN from the first step": (
        TORCH,
        [skip(20, (NAN, NAN))],
        [("nonfinite_forward", "fatal")],
    ),
    "every step skipped by a mask that a trace cannot see": (
        COLOSSAL,
        [skip(30, (2.0, 2.0))],
        [("scale_floor", "fatal")],
    ),
    "every step skipped, with a hysteresis of two": (
        MEGATRON,
        [skip(40, (9.0, 9.0))],
        [("scale_floor", "fatal")],
    ),
    "twenty early NaNs, and healthy since": (
        TORCH,
        [skip(20, (NAN, NAN)), clean(200, (3.0, 2.0))],
        [("nonfinite_forward", "fatal")],
    ),
    "the gradients are cleaned before the scaler sees them": (
        TORCH,
        [clean(50), clean(5, (NAN, NAN)), clean(5)],
        [("cleaned_gradients", "error")],
    ),
    "one skip that anomaly mode reports": (
        Scaler(init=2.0**17),
        [skip(1), clean(60)],
        [("calibration", "info")],
    ),
    "a lazy loss every sixteenth step, with a growth interval of eight": (
        Scaler(interval=8),
        [clean(16), *[skip(1, (40.0, 40.0)), clean(15)] * 5],
        [("many_optimizers", "warning")],
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_as_reported(name: str, tmp_path: Path):
    scaler, parts, expected = TRACES[name]
    assert said(tmp_path, rows(parts, scaler), scaler.name) == expected


def test_the_same_batch_is_not_finite_in_each_epoch(tmp_path: Path):
    parts = [clean(7), skip(1, (NAN, NAN)), clean(12)] * 3
    epoch = [i // 20 for i in range(60)]
    batch = [i % 20 for i in range(60)]
    assert said(tmp_path, rows(parts, TORCH, epoch=epoch, batch_id=batch)) == [("bad_batch", "warning")]


def test_ranks_at_different_powers_of_two(tmp_path: Path):
    one = rows([clean(40)], TORCH, rank=[0] * 40)
    other = rows([clean(20), skip(1), clean(19)], TORCH, rank=[1] * 40)
    assert said(tmp_path, one + other) == [("rank_disagreement", "fatal")]


def test_a_scale_that_is_infinite(tmp_path: Path):
    attempts = rows([skip(12)], TORCH)
    for row in attempts:
        row |= {"scale": math.inf, "scale_after": math.inf}
    assert [kind for kind, _ in said(tmp_path, attempts)] == ["no_updates"]


def test_a_warm_up_that_counts_what_was_skipped(tmp_path: Path):
    lr = [min(i + 1, 40) / 40 for i in range(120)]
    attempts = rows([skip(5), clean(115)], TORCH, lr=lr)
    assert said(tmp_path, attempts) == [("schedule_ahead", "info"), ("calibration", "info")]


def test_a_norm_that_is_nan_in_steps_that_were_taken(tmp_path: Path):
    """bfloat16 with a scale of 1: nothing skips, and the weights are gone."""
    fixed = Scaler(init=1.0, interval=10**9)
    attempts = rows([clean(60, (0.71, 0.70), (0.7, 0.7)), clean(6, (NAN, NAN), (NAN, NAN))], fixed)
    assert [f for f in said(tmp_path, attempts) if f[1] != "info"] == [("weights_poisoned", "fatal")]


def test_a_norm_of_scaled_gradients_is_no_divergence(tmp_path: Path):
    """It doubles whenever the scale does, from 365 to 2^10 times as much, and the loss falls all the while."""
    attempts = rows([clean(440, (1.0, 0.9))], Scaler(init=2.0**6, interval=40))
    for row in attempts:
        row["grad_norm"] = 365.0 / 64 * row["scale"] * (1.0 + 0.1 * math.sin(row["attempt"]))
    assert said(tmp_path, attempts) == []
