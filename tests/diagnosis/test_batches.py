import math

import pytest
from build import Run


def broken_at(
    *attempts: int, batches: dict[int, float] | None = None, epoch: int = 0, total: int = 200
) -> Run:
    run = Run()
    for i in range(total):
        run.broken(1) if i in attempts else run.clean(1)
        run.scale = 2.0**10
    for i, row in enumerate(run.rows):
        if batches:
            row["log.batch_id"] = batches.get(i, float(i % 37))
        if epoch:
            row["log.epoch"] = float(i // epoch)
    return run


def headline(run: Run) -> str:
    (finding,) = run.findings()
    assert (finding.kind, finding.severity) == ("bad_batch", "warning")
    return finding.headline


def test_one_batch_is_named_in_the_evidence():
    (finding,) = broken_at(50, batches={50: 17.0}).findings()
    assert (finding.evidence[0].text, finding.confidence) == ("Batches: 17 at step 50.", 0.6)


def test_the_same_batch_twice_is_the_cause():
    assert headline(broken_at(50, 133, batches={50: 17.0, 133: 17.0})).startswith("Batch 17 gives a loss")
    assert "2 times since step 50" in headline(broken_at(50, 133, batches={50: 17.0, 133: 18.0}))


def test_the_same_place_in_two_epochs():
    assert "attempt 10 of it" in headline(broken_at(50, 90, epoch=40))
    assert "2 times since step 50" in headline(broken_at(50, 91, epoch=40))


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        ((20, 60, 100), "every 40 attempts"),
        ((20,), "one attempt only"),
        ((20, 60), "2 times since step 20, for one attempt each time. Steps are skipped"),
        ((20, 60, 101), "3 times since step 20"),
    ],
)
def test_three_at_equal_distances_have_a_period(attempts: tuple[int, ...], said: str):
    assert said in headline(broken_at(*attempts))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (broken_at(50, 133, batches={50: 17.0, 133: 17.0}), "Look at batch 17: missing values"),
        (broken_at(50, 90, epoch=40), "Look at the data that attempt 10 of each epoch is given"),
        (broken_at(20, 60, 100), "Look at the data that is loaded at step 20, and again every 40 attempts"),
        (broken_at(20, 60), "If it comes again, log which batch it was"),
    ],
)
def test_what_is_known_of_the_data_is_looked_at_first(run: Run, said: str):
    (finding,) = run.findings()
    assert finding.advice[0].text.startswith(said)


def test_no_skip_is_claimed_where_the_step_was_taken():
    run = Run().clean(50).clean(1, loss=math.inf).clean(5)
    assert "the step was taken" in headline(run)
    run = Run().clean(50).skip(1).clean(1, loss=math.inf).clean(5)  # the skip was of a finite loss
    assert "the step was taken" in headline(run)
    run = broken_at(50, 133, batches={50: 17.0, 133: 17.0})
    assert "Steps are skipped" in headline(run)
    run.rows[50] |= {"found_inf": 0, "n_inf": 0}
    run.rows[50]["loss"] = math.inf
    assert "steps were taken" in headline(run)
