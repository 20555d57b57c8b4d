import math
import time
import tracemalloc

import pytest
from build import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from ampwatch.diagnosis import Diagnosis
from ampwatch.records import Batch


def test_no_data():
    verdict = Diagnosis().verdict()
    assert (verdict.word, verdict.severity, verdict.kind) == ("no data", None, None)


def test_a_healthy_run_says_what_was_skipped():
    verdict = Run(interval=100).clean(100).skip(1).clean(20).diagnosis().verdict()
    assert (verdict.word, verdict.severity, verdict.kind) == ("healthy", "info", None)
    assert (
        verdict.sentence
        == "Healthy: 120 steps taken, 1 skipped (ordinary for loss scaling); loss scale 2^16."
    )


def test_the_verdict_is_the_worst_finding():
    verdict = Run().clean(10).broken(8).diagnosis().verdict()
    assert (verdict.word, verdict.severity, verdict.kind, verdict.first_step) == (
        "failing",
        "fatal",
        "nonfinite_forward",
        10,
    )


def test_a_fault_that_recovered_is_a_warning():
    assert Run().clean(10).broken(8).clean(10).diagnosis().verdict().word == "warning"


def test_a_fault_that_comes_again_is_one_finding():
    run = Run().clean(10).broken(1).clean(10).broken(1).clean(10)
    (finding,) = run.findings()
    assert (finding.kind, finding.first_attempt, finding.last_attempt) == ("bad_batch", 10, 21)
    assert finding.evidence[-1].text == "Seen 2 times, the last time at step 20 (attempt 21)."


def test_a_fault_that_recovered_once_and_is_there_again_does_not_say_that_it_recovered():
    (finding,) = Run().clean(10).broken(3).clean(10).broken(8).findings()
    assert (finding.first_attempt, finding.last_attempt, finding.state) == (10, 30, "open")
    since = "The loss is not finite from step 20 (attempt 23) on. It does not recover by itself"
    assert finding.headline.startswith(since)
    assert finding.evidence[-1].text == "Seen 2 times, first at step 10."


def test_ranks_that_say_the_same_are_one_finding():
    runs = [Run(producer=f"{rank:032x}", rank=rank).clean(10).broken(3) for rank in range(3)]
    (finding,) = Diagnosis.from_batches(b for run in runs for b in run.batches()).findings()
    assert finding.rank == 0
    assert finding.evidence[-1].text == "The same on 2 other ranks: 1, 2."


def test_streams_are_judged_apart():
    run = Run().clean(40)
    for row in run.rows[1::2]:
        row |= {"stream": 1, "loss": 50.0, "norm": 900.0}
    assert run.kinds() == []


ORDINARY = {"lr": 1e-3, "residue": 0, "log.grad_norm": 1.0, "max_abs": 1.0}
HABITS = {
    "z": {"lr": 0.0},
    "w": {"micro_batches": 4, "norm": 4.0},
    "l": {"residue": 1},
    "n": {"log.grad_norm": math.inf},
    "u": {"losses": 0},
}


@st.composite
def runs(draw: st.DrawFn) -> Run:
    run = Run(interval=draw(st.sampled_from([7, 50])))
    for length, what in draw(
        st.lists(st.tuples(st.integers(1, 40), st.sampled_from("csbrpzwlnu")), max_size=12)
    ):
        if what == "c":
            run.clean(length).tensor({-24: 300, -20: 300}, zeros=400)
        elif what == "r":
            run.clean(loss=[1.3**i for i in range(length)], norm=[1.3**i for i in range(length)])
        elif what == "p":
            run.clean(loss=[6.0 * length, *[1.0 + length] * (length % 12)])
        elif what in HABITS:
            run.clean(length)
            for row in run.rows[-length:]:
                row |= HABITS[what]
        else:
            run.skip(length % 9 + 1, loss=1.0 if what == "s" else math.nan)
            run.event("call_fault", fault="step_twice", optimizer=0, order=[], raised=True)
    run.rows = [ORDINARY | row for row in run.rows]
    return run.event("origin", attempt=0, origins={"0": "float16"})


@settings(max_examples=60)
@given(runs(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_order_and_any_parts_give_the_same_findings(run: Run, size: int, random):
    whole = run.findings()
    diagnosis, batches = Diagnosis(), run.batches(size)
    for batch in random.sample([*batches, *batches], 2 * len(batches)):
        diagnosis.add(batch)
        if random.random() < 0.2:
            diagnosis.findings()
    assert diagnosis.findings() == whole


@settings(max_examples=60)
@given(runs(), st.integers(1, 40))
def test_asked_after_each_batch_the_findings_are_those_of_the_whole(run: Run, size: int):
    """In order, as a job's own diagnosis and the server are: nothing is folded anew."""
    diagnosis = Diagnosis()
    for batch in run.batches(size):
        diagnosis.add(batch)
        diagnosis.findings()
    assert diagnosis.findings() == run.findings()


def test_a_learning_rate_of_zero_is_told_since_when_it_is_so_however_often_it_was_asked():
    run, diagnosis = Run().clean(90), Diagnosis()
    run.rows = [ORDINARY | row | {"lr": 1e-3 * (i < 40)} for i, row in enumerate(run.rows)]
    for batch in run.batches(10):
        diagnosis.add(batch)
        diagnosis.findings()
    (finding,) = [f for f in diagnosis.findings() if f.severity != "info"]
    assert (finding.kind, finding.first_attempt) == ("no_updates", 40)
    assert "from step 40 on: 50 steps taken" in finding.headline


@settings(max_examples=60)
@given(runs(), st.integers(1, 12), st.integers(24, 60), st.randoms(use_true_random=False))
def test_within_a_window_the_findings_are_those_of_the_whole(run: Run, size: int, window: int, random):
    """Events first, as a job packs them; neighbours of the others in any order."""
    batches = sorted(run.batches(size), key=lambda batch: batch.kind != "events")
    first = sum(batch.kind == "events" for batch in batches)
    for i in range(first, len(batches) - 1, 2):
        batches[i : i + 2] = random.sample(batches[i : i + 2], 2)
    bounded = Diagnosis(window=window)
    for batch in batches:
        bounded.add(batch)
        if random.random() < 0.2:
            bounded.findings()
    assert bounded.findings() == run.findings()
    assert bounded.verdict() == run.diagnosis().verdict()


def held_bytes(diagnosis: Diagnosis, batches: list[Batch]) -> int:
    """What a diagnosis holds after these, as long as nobody asks."""
    tracemalloc.start()
    for batch in batches:
        diagnosis.add(batch)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def test_within_a_window_memory_does_not_grow_with_the_attempts():
    batches, diagnosis = batches_of(40_000), Diagnosis(window=512)
    diagnosis.add(batches[0])
    early = held_bytes(diagnosis, batches[1:200])
    assert held_bytes(diagnosis, batches[200:]) < 2 * early


def batches_of(attempts: int) -> list[Batch]:
    run = Run(interval=200)
    while len(run.rows) < attempts:
        run.clean(400).skip(1)
    return run.batches(50)


def seconds_per_batch(diagnosis: Diagnosis, batches: list[Batch]) -> float:
    start = time.process_time()
    for batch in batches:
        diagnosis.add(batch)
        diagnosis.findings()
    return (time.process_time() - start) / len(batches)


@pytest.mark.parametrize("attempts", [40_000])
def test_the_cost_of_a_batch_does_not_grow_with_the_run(attempts: int):
    diagnosis, batches = Diagnosis(), batches_of(attempts)
    early = seconds_per_batch(diagnosis, batches[:100])
    for batch in batches[100:-100]:
        diagnosis.add(batch)
    diagnosis.findings()
    assert seconds_per_batch(diagnosis, batches[-100:]) < 2 * early + 1e-3


def lost(run: Run, first: int, last: int) -> Run:
    """The run without these attempts."""
    run.rows = [row for row in run.rows if not first <= row["attempt"] <= last]
    return run


def test_attempts_that_were_lost_are_told_and_not_read_across():
    broken = Run().clean(50).broken(1).clean(1).broken(1).clean(9)
    assert [f.kind for f in lost(broken, 51, 51).findings()] == ["bad_batch"]
    verdict = broken.diagnosis().verdict()
    assert verdict.kind == "bad_batch"
    assert verdict.not_judged.startswith("Lost from step 50 (attempt 51) on: 1 attempt. Nothing is said")


def test_a_whole_run_leaves_nothing_unjudged():
    assert Run().clean(50).broken(2).clean(9).diagnosis().verdict().not_judged == ""


def test_tensors_that_were_dropped_are_told():
    run = Run().clean(5).event("dropped", kind="tensors", first_seq=1, last_seq=2, reason="disk")
    assert run.diagnosis().verdict().not_judged.startswith("Some tensor statistics were dropped")


def test_a_lost_part_that_comes_late_is_whole_again():
    run = Run().clean(40)
    first, *rest = run.batches(10)
    diagnosis = Diagnosis.from_batches([first, rest[0], rest[2], rest[3]])
    assert diagnosis.verdict().not_judged
    diagnosis.add(rest[1])
    assert diagnosis.verdict().not_judged == ""


def test_a_chain_tells_which_came_first():
    run = Run().clean(200).clean(loss=[1.6**i for i in range(16)], norm=[1.6**i for i in range(16)])
    (finding,) = [f for f in run.skip(2, loss=900.0).broken(3).findings() if f.severity != "info"]
    assert [(link.kind, link.attempt) for link in finding.chain] == [
        ("divergence", finding.first_attempt),
        ("nonfinite_forward", 218),
    ]
    assert finding.chain[1].text == "the loss is not finite"
    assert Run().clean(200).broken(3).findings()[0].chain == []


def test_where_the_scale_fell_to_comes_after_what_let_it_fall():
    findings = Run().clean(200).skip(1).broken(130).findings()
    (finding,) = [f for f in findings if f.severity != "info"]
    assert [(link.kind, link.attempt) for link in finding.chain] == [
        ("nonfinite_forward", 201),
        ("dead_zone", 280),  # the first that leaves the scale below 2^-64
    ]
