from __future__ import annotations

import httpx
import numpy as np
import pytest
import sent

from ampwatch.records import MISSING, Event, pack_table
from ampwatch.replay import recording_of, what_if
from ampwatch_server.service import Service
from ampwatch_server.store.removal import empty_run
from ampwatch_server.store.runs import delete_run

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
    return pack_table("attempts", columns, **sent.key(seq, producer=producer))


def tensors(producer: str, at: range, seq: int = 2) -> sent.Batch:
    n = len(at)
    hist = np.zeros((n, 64), np.int64)
    hist[:, [36, 44]] = 100  # binades -12 and -4 of the scaled gradient
    columns = {"attempt": np.array(at), "tensor": np.zeros(n, np.int64), "scale": np.full(n, 2.0**16)}
    counts = {"numel": np.full(n, 200), "n_zero": np.zeros(n, np.int64), "hist": hist}
    return pack_table("tensors", columns | counts, **sent.key(seq, producer=producer))


def batches(producer: str) -> list[sent.Batch]:
    return [described(producer), attempts(producer), tensors(producer, range(100, 3000, 100))]


@pytest.mark.parametrize("folded", [True, False])
def test_the_store_replays_as_the_spool_does(service: Service, folded: bool) -> None:
    """From chunks, and from what waits in the inbox."""
    sent.store(service, described(sent.P))
    sent.store(service, *batches(sent.P)[1:], fold=folded)
    stored = service.recordings.read("r").recording
    spooled = recording_of(batches(sent.P))
    for mine, its in zip(stored.attempts, spooled.attempts, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert stored.attempt_s == 0.5
    asked = {"init_scale": 2.0}  # 14 binades lower and more: half of the elements fall below 2^-25
    for recording in (stored, spooled):
        likely = what_if(recording, "torch", asked).effects["likely"]
        assert (likely.skipped, likely.underflow_share) == (0, 0.5)


def test_processes_of_a_rank_stand_one_after_the_other(service: Service, clock: list[float]) -> None:
    sent.store(service, *batches(sent.P))
    clock[0] += 1
    sent.store(service, *batches(sent.Q))
    recording = service.recordings.read("r").recording
    assert (recording.attempts.n, recording.attempts.attempt[3000]) == (6000, 3000)
    assert recording.attempts.overflow.sum() == 2 * BURST


def test_a_recording_is_kept_until_the_run_changes(service: Service) -> None:
    sent.store(service, described(sent.P), attempts(sent.P, 100))
    first = service.recordings.read("r")
    assert service.recordings.read("r") is first
    sent.store(service, attempts(sent.P, 200, seq=2))
    assert service.recordings.read("r").recording.attempts.n == 200


def test_what_would_have_happened(client: httpx.Client) -> None:
    sent.send(client, *batches(sent.P))
    answer = client.post("/v1/runs/r/replay?points=10", json={"parameters": {"init_scale": 2**16}}).json()
    assert (answer["code"], answer["attempts"]) == ("torch.amp.GradScaler()", 3000)
    assert (answer["recorded"]["skipped"], answer["replayed"]["likely"]["skipped"]) == (BURST, 0)
    assert (answer["replayed"]["worst"]["skipped"], answer["replayed"]["best"]["skipped"]) == (BURST, 0)
    assert answer["replayed"]["likely"]["path"]["attempt"] == list(range(0, 3000, 300))


def test_recommendations(client: httpx.Client) -> None:
    sent.send(client, *batches(sent.P))
    found = client.get("/v1/runs/r/recommendations").json()
    assert found["scaler"] == SCALER
    assert [one["kind"] for one in found["recommendations"]] == ["calibration"]
    assert found["recommendations"][0]["text"] == (
        "Begin at 2^16, the scale that the run settled on: 0 steps would likely have been lost instead of 14."
    )


def test_the_figure_shows_the_four_paths(client: httpx.Client) -> None:
    sent.send(client, *batches(sent.P))
    assert client.post("/v1/runs/r/replay", json={}).json()["figure"] is None
    figure = client.post("/v1/runs/r/replay?theme=dark", json={}).json()["figure"]
    names = ["as recorded", "at worst", "at best", "this setting, likely"]
    assert [trace["name"] for trace in figure["data"]] == names


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"policy": "none"}, "policy"), ({"parameters": {"growth_interval": 0}}, "parameters.growth_interval")],
)
def test_what_cannot_be_replayed_is_named(client: httpx.Client, asked: dict[str, object], field: str) -> None:
    sent.send(client, *batches(sent.P))
    answer = client.post("/v1/runs/r/replay", json=asked)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_a_run_without_attempts_has_nothing_to_replay(client: httpx.Client) -> None:
    sent.send(client, described(sent.P))
    answer = client.post("/v1/runs/r/replay", json={}).json()
    assert (answer["attempts"], answer["recorded"]["path"]) == (0, {"attempt": [], "low": [], "high": []})
    assert client.get("/v1/runs/r/recommendations").json()["recommendations"] == []


def test_policies_are_listed_with_their_defaults(client: httpx.Client) -> None:
    policies = client.get("/v1/policies").json()["policies"]
    assert policies["torch"] == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    }


def test_another_run_of_the_same_id_is_not_taken_for_the_one_before(
    service: Service, clock: list[float]
) -> None:
    sent.store(service, *batches(sent.P))
    assert service.recordings.read("r").recording.attempts.n == 3000
    empty_run(service.database, "r")
    service.database.write(lambda c: delete_run(c, "r"))
    clock[0] += 1
    sent.store(service, described(sent.P), attempts(sent.P, 100))
    assert service.recordings.read("r").recording.attempts.n == 100


def test_samples_are_spread_over_all_windows(service: Service) -> None:
    sent.store(service, described(sent.P), attempts(sent.P), tensors(sent.P, range(0, 3000, 5)))
    at = service.recordings.read("r").recording.losses.attempt
    assert np.bincount(at // 1024).min() >= 7  # of 24 in 3 windows
