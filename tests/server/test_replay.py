from __future__ import annotations

import numpy as np
import pytest
import sent

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.records import MISSING, Event
from ampwatch.replay import recording_of, what_if
from ampwatch.replay.whatif import defaults_of
from ampwatch_server.service import Service

P, Q = "a" * 32, "b" * 32
SCALER = {"scaler": 0, "class": "GradScaler", "init_scale": 2.0**30, "growth_interval": 2000}
BURST = 14  # attempts from 2^30 down to 2^16, which all overflow


def described(producer: str) -> sent.Batch:
    return sent.events(
        Event("scaler", 1.0, data=SCALER),
        Event("stream", 1.0, stream=0, data={"stream": 0, "scaler": 0, "optimizers": [0]}),
        Event("origin", 2.0, data={"origins": {"0": "float16"}}),
        producer=producer,
    )


def attempts(producer: str, n: int = 3000, seq: int = 1) -> sent.Batch:
    scale = np.where(np.arange(n) < BURST, 2.0 ** (30 - np.arange(n)), 2.0**16)
    skipped = (np.arange(n) < BURST).astype(np.uint8)
    columns = {
        "attempt": np.arange(n),
        "scale": scale,
        "found_inf": skipped,
        "loss": np.ones(n),
        "headroom_log2": np.where(skipped, MISSING, 3.0),
        "time": 1.0 + 0.5 * np.arange(n),
    }
    return sent.table("attempts", columns, producer=producer, seq=seq)


def tensors(producer: str, at: range, seq: int = 2) -> sent.Batch:
    n = len(at)
    hist = np.zeros((n, 64), np.int64)
    hist[:, [36, 44]] = 100  # binades -12 and -4 of the scaled gradient
    columns = {"attempt": np.array(at), "tensor": np.zeros(n, np.int64), "scale": np.full(n, 2.0**16)}
    counts = {"numel": np.full(n, 200), "n_zero": np.zeros(n, np.int64), "hist": hist}
    return sent.table("tensors", columns | counts, producer=producer, seq=seq)


def batches(producer: str) -> list[sent.Batch]:
    return [described(producer), attempts(producer), tensors(producer, range(100, 3000, 100))]


@pytest.mark.parametrize("folded", [True, False])
def test_the_store_replays_as_the_spool_does(service: Service, folded: bool) -> None:
    """From chunks, and from what waits in the inbox."""
    sent.store(service, *batches(P), process=folded)
    stored = service.recordings.read("r").recording
    spooled = recording_of(batches(P))
    for mine, its in zip(stored.attempts, spooled.attempts, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert stored.attempt_s == 0.5
    asked = {"init_scale": 2.0**6}
    assert what_if(stored, "torch", asked).effects["likely"].skipped == 0
    assert what_if(stored, "torch", asked).effects["likely"].underflow_share == pytest.approx(
        what_if(spooled, "torch", asked).effects["likely"].underflow_share
    )


def test_processes_of_a_rank_stand_one_after_the_other(service: Service, clock: list[float]) -> None:
    sent.store(service, *batches(P))
    clock[0] += 1
    sent.store(service, *batches(Q))
    recording = service.recordings.read("r").recording
    assert (recording.attempts.n, recording.attempts.attempt[3000]) == (6000, 3000)
    assert recording.attempts.overflow.sum() == 2 * BURST


def test_a_recording_is_kept_until_the_run_changes(service: Service) -> None:
    sent.store(service, described(P), attempts(P, 100))
    first = service.recordings.read("r")
    assert service.recordings.read("r") is first
    sent.store(service, attempts(P, 200, seq=2))
    assert service.recordings.read("r").recording.attempts.n == 200
