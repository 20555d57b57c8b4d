import math

import pytest
from build import Run

from ampwatch.diagnosis import Diagnosis, Finding


def together(*runs: Run) -> list[Finding]:
    return Diagnosis.from_batches(batch for run in runs for batch in run.batches()).findings()


def rank(n: int, scale: float = 2.0**16) -> Run:
    return Run(scale=scale, producer=f"{n + 1:032x}", rank=n)


def test_ranks_that_differ_in_a_skip_are_told_since_then():
    (finding,) = together(rank(0).clean(300), rank(1).clean(200).skip(1).clean(99), rank(2).clean(300))
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "fatal", 200)
    assert finding.headline.startswith("Ranks 0 and 1 differ")
    assert (
        finding.evidence[0].text
        == "At step 200: rank 0: loss scale 2^16, stepped; rank 1: loss scale 2^16, skipped."
    )


def test_ranks_of_other_scales_are_told_at_once():
    assert together(rank(0).clean(5), rank(1, scale=2.0**12).clean(5))[0].first_attempt == 0


def test_what_the_ranks_say_beside_it_is_evidence():
    findings = together(rank(0).clean(60), rank(1).clean(50).broken(10))
    assert [f.kind for f in findings] == ["rank_disagreement"]


def test_ranks_that_agree_are_silent():
    runs = [rank(n).clean(200).skip(1).clean(99) for n in range(3)]
    assert [f.kind for f in together(*runs)] == ["growth_probe"]
    assert together(rank(0).clean(300), rank(1).clean(250)) == []  # one is behind


def spoiled(n: int, broken: list[list[int]], attempts: int = 40) -> list[Finding]:
    """Ranks that skip together; `broken` are the attempts of each in which its own loss is NaN."""
    runs = [rank(i) for i in range(n)]
    everywhere = {attempt for its in broken for attempt in its}
    for run, its in zip(runs, broken, strict=True):
        for attempt in range(attempts):
            if attempt in everywhere:
                run.skip(1, loss=math.nan if attempt in its else 1.0)
            else:
                run.clean(1)
    return [f for f in together(*runs) if f.severity != "info"]


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_one_rank_that_breaks_three_times_in_a_row(guilty: int):
    broken = [list(range(20, 23)) if i == guilty else [] for i in range(3)]
    (finding,) = spoiled(3, broken)
    assert (finding.kind, finding.severity, finding.rank, finding.first_attempt) == (
        "rank_fault",
        "fatal",
        guilty,
        20,
    )


def test_asking_after_each_batch_of_each_rank_changes_nothing():
    """While the other rank is behind there is nothing to compare: that ends no run of bad attempts."""
    runs = [rank(i).clean(20) for i in range(2)]
    for run, loss in zip(runs, (1.0, math.nan), strict=True):
        run.skip(3, loss=loss).clean(5)
    diagnosis = Diagnosis()
    for pair in zip(*(run.batches(1) for run in runs), strict=True):
        for batch in pair:
            diagnosis.add(batch)
            diagnosis.findings()
    assert [f.kind for f in diagnosis.findings() if f.severity != "info"] == ["rank_fault"]
    assert diagnosis.findings() == together(*runs)


def test_twice_in_a_row_is_not_enough_and_six_times_in_all_is():
    assert [f.kind for f in spoiled(2, [[], [20, 21]])] == ["nonfinite_forward"]
    assert [f.kind for f in spoiled(2, [[], [5, 10, 15, 20, 25, 30]])] == ["rank_fault"]
    assert [f.kind for f in spoiled(2, [[], [5, 10, 15, 20, 26]])] == ["bad_batch"]


def test_all_ranks_that_break_or_take_turns_are_no_fault_of_one():
    both = list(range(20, 30))
    assert {f.kind for f in spoiled(2, [both, both])} == {"nonfinite_forward"}
    assert "rank_fault" not in {f.kind for f in spoiled(2, [[20, 21, 22], [30, 31, 32]])}


def test_a_loss_that_a_rank_does_not_report_is_not_broken():
    silent = rank(1).clean(40)
    for row in silent.rows:
        del row["loss"]
    assert together(rank(0).clean(40), silent) == []


def test_a_job_that_was_started_again_is_compared_with_its_own_time():
    old, new = rank(0).clean(50), rank(1).clean(20).skip(1).clean(20)
    for run, start in ((old, 0.0), (new, 7200.0)):
        for row in run.rows:
            row["time"] = start + row["attempt"]
    assert [f.kind for f in together(old, new)] == ["growth_probe"]


def test_batches_in_parts_and_out_of_order_say_the_same():
    runs = [rank(0).clean(300), rank(1).clean(200).skip(1).clean(99)]
    whole, diagnosis = together(*runs), Diagnosis()
    for batch in sorted((b for run in runs for b in run.batches(40)), key=lambda b: (b.seq % 3, b.producer)):
        diagnosis.add(batch)
        diagnosis.findings()
    assert diagnosis.findings() == whole


def looked(n: int, broken: list[list[int]], first: int = 20, attempts: int = 40) -> list[Finding]:
    """Two ranks that skip together from an attempt on with finite losses; `broken`: by their own gradients."""
    runs = [rank(i) for i in range(n)]
    for run, its in zip(runs, broken, strict=True):
        run.clean(first)
        for attempt in range(first, attempts):
            run.skip(1)
            run.event("local_gradients", attempt, tensors=[0], nonfinite=[0] if attempt in its else [])
    return [f for f in together(*runs) if f.kind == "rank_fault"]


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_one_rank_whose_own_gradients_are_not_finite_three_times_in_a_row(guilty: int):
    (finding,) = looked(3, [[21, 22, 23] if i == guilty else [] for i in range(3)])
    assert (finding.rank, finding.first_attempt, finding.evidence[0].value) == (guilty, 21, 3)
    assert finding.headline.startswith(f"Rank {guilty} alone has gradients that are not finite")


def test_gradients_of_both_or_while_the_scale_settles_are_no_fault_of_one():
    assert looked(2, [[], [21, 22, 24, 25, 27, 28]]) == []
    assert looked(2, [[21, 22, 23], [21, 22, 23]]) == []
    assert looked(2, [[], [1, 2, 3, 4]], first=0) == []


def replicas(*norms: list[float], first: int = 0, **reach: float) -> list[Finding]:
    """Ranks with these norms, of which all but the first say that their gradients are averaged with rank `first`."""
    runs = [rank(i).clean(len(its), loss=[1.0 + i] * len(its), norm=its) for i, its in enumerate(norms)]
    for i, run in enumerate(runs):
        run.event("tensors", 0, tensors=[{"id": 0, "name": "w", "shape": [64, 64]}])
        if i:
            run.event("replicas", 0, tensors=[0], first=first)
        checked = {"checked": 1, "nonfinite": [], "count": 0, "reach": reach.get(f"rank_{i}", 1.0)}
        run.event("finite_check", 0, parameters=checked)
    return together(*runs)


def test_averaged_gradients_of_another_norm_are_told_after_three():
    (finding,) = replicas([1.0] * 12, [1.0] * 8 + [2.0] * 4)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "fatal", 8)
    text = "At step 8 the norm of the true gradient is 1 on rank 0 and 2 on rank 1."
    assert finding.evidence[0].text == text
    assert replicas([1.0] * 12, [1.0] * 8 + [2.0] * 2 + [1.0] * 2) == []


def test_norms_that_rounding_tells_apart_are_the_same():
    assert replicas([1.0] * 20, [1.0009] * 20) == []


def test_a_rank_whose_group_has_another_first_is_not_compared_with_the_lowest():
    """As of two groups of tensor parallel ranks, each with half of every matrix."""
    assert replicas([1.0] * 20, [2.0] * 20, [2.0] * 20, first=1) == []


def test_weights_of_another_reach_are_told_at_the_check_that_shows_it():
    (finding,) = replicas([1.0] * 4, [1.0] * 4, rank_0=30.0, rank_1=31.0)
    assert (finding.severity, finding.first_attempt, finding.evidence[0].value) == ("fatal", 0, 31.0)
    assert finding.headline.startswith("Ranks 0 and 1 have different weights, seen at step 0")
    assert replicas([1.0] * 4, [1.0] * 4, rank_0=30.0, rank_1=30.001) == []


def by_themselves(
    loss: float = 2.0,
    norm: float = 2.0,
    largest: float = 2.0,
    shape: tuple[int, ...] = (64, 64),
    attempts: int = 10,
) -> list[Finding]:
    """Two ranks without a wrapper; what is said is of the second, the first has 1 of everything."""
    runs = [rank(0), rank(1)]
    for run, of_rank in zip(runs, ((1.0, 1.0, 1.0), (loss, norm, largest)), strict=True):
        run.event("tensors", 0, tensors=[{"id": i, "name": f"w{i}", "shape": list(shape)} for i in range(2)])
        for _ in range(attempts):
            run.clean(loss=of_rank[0], norm=of_rank[1])
            run.tensor({-3: 400}, max_abs=of_rank[2])
            run.tensor({-3: 400}, tensor=1, max_abs=2 * of_rank[2])
    return together(*runs)


def test_ranks_of_which_nothing_agrees_train_each_by_itself():
    (finding,) = by_themselves()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "warning", 0)
    assert by_themselves(attempts=7) == []


@pytest.mark.parametrize("same", ["loss", "norm", "largest"])
def test_ranks_that_agree_in_something_are_parts_of_one_training(same: str):
    """A loss that tensor parallel ranks share, gradients that are averaged by hand, experts beside a common trunk."""
    assert by_themselves(**{same: 1.0}) == []


def test_flat_tensors_are_shards():
    assert by_themselves(shape=(4096,)) == []


def test_ranks_that_train_by_themselves_explain_nothing_else():
    runs = [rank(i) for i in range(2)]
    for i, run in enumerate(runs):
        run.event("tensors", 0, tensors=[{"id": 0, "name": "w", "shape": [64, 64]}])
        for _ in range(10):
            run.clean(loss=1.0 + i, norm=1.0 + i).tensor({-3: 400}, max_abs=1.0 + i)
        run.broken(8)
    assert [f.kind for f in together(*runs)] == ["nonfinite_forward", "rank_disagreement"]
