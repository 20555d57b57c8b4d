import pytest
from build import Run

BAD = {"checked": 9, "nonfinite": ["head.weight"], "count": 1}
GOOD = {"checked": 9, "nonfinite": [], "count": 0}


def checked(run: Run, attempt: int, parameters: dict = GOOD, buffers: dict = GOOD) -> Run:
    return run.event("finite_check", attempt=attempt, parameters=parameters, buffers=buffers)


def test_parameters_that_became_nan_are_the_headline_of_the_loss():
    run = checked(Run().clean(100).broken(4), 100, parameters=BAD)
    (finding,) = run.findings()
    assert (finding.kind, finding.tensor, finding.first_attempt) == ("weights_poisoned", "head.weight", 100)
    assert "before step 100" in finding.headline
    assert (
        finding.evidence[0].text
        == "1 of 9 parameters are not finite, the first is head.weight; all were at first."
    )


def test_a_check_without_a_loss_that_broke_is_told_too():
    (finding,) = checked(checked(Run().clean(450), 200), 400, parameters=BAD).findings()
    assert (finding.kind, finding.first_attempt) == ("weights_poisoned", 400)


def test_buffers_are_told_before_the_batch_that_poisoned_them():
    (finding,) = checked(Run().clean(100).broken(1).clean(50), 100, buffers=BAD).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("buffers_poisoned", "fatal", 100)


def test_parameters_before_buffers():
    run = checked(Run().clean(100).broken(4), 100, parameters=BAD, buffers=BAD)
    assert [f.kind for f in run.findings()] == ["weights_poisoned"]


def test_what_was_mended_is_recovered():
    run = checked(Run().clean(100).broken(4), 100, parameters=BAD).clean(100)
    assert checked(run, 200).kinds() == [("weights_poisoned", "fatal", "recovered")]


def test_finite_checks_are_silent():
    assert checked(checked(Run().clean(450), 200), 400).kinds() == []


@pytest.mark.parametrize(
    ("n", "kinds"), [(79, ["nonfinite_forward"]), (80, ["nonfinite_forward"]), (81, ["dead_zone"])]
)
def test_the_dead_zone_is_near_below_2_to_the_minus_64(n: int, kinds: list[str]):
    assert [f.kind for f in Run().broken(n).findings()] == kinds


def test_how_far_it_is_to_the_dead_zone():
    (finding,) = Run().broken(100).findings()
    assert "after 44 more skips the first healthy batch destroys the weights." in finding.headline
    assert finding.state == "open"
    (finding,) = Run().broken(144).findings()
    assert "from here on the first healthy batch destroys the weights." in finding.headline


def test_twenty_skips_are_wanted():
    assert [f.kind for f in Run(scale=2.0**-60).skip(19).findings()] == ["no_updates"]
    assert [f.kind for f in Run(scale=2.0**-60).skip(20).findings()] == ["dead_zone"]


def test_an_infinite_step_is_told_without_a_model():
    run = Run().broken(144).clean(1).broken(3)
    run.rows[144]["applied_nonfinite"] = 1
    for row in run.rows:
        row.setdefault("applied_nonfinite", 0)
    (finding,) = run.findings()
    assert (finding.kind, finding.first_attempt, finding.severity) == ("weights_poisoned", 144, "fatal")
