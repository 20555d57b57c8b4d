import math

import pytest
from build import Run

from ampwatch.records import MISSING


def test_finite_loss_at_scale_1_is_an_error_and_five_later_fatal():
    assert Run().skip(17).kinds() == [("no_updates", "error", "open")]
    assert Run().skip(21).kinds() == [("no_updates", "error", "open")]
    assert Run().skip(22).kinds() == [("no_updates", "fatal", "open")]


def test_a_summed_loss_that_settles_below_1_is_healthy():
    assert Run().skip(18).clean(200).kinds() == [("calibration", "info", "explained")]


def test_nothing_learned_is_evidence_of_a_forward_that_breaks_from_the_start():
    (finding,) = Run().broken(12).findings()
    assert finding.kind == "nonfinite_forward"
    assert any("Nothing has been learned since step 0" in e.text for e in finding.evidence)


def test_an_unknown_loss_counts_as_finite():
    assert Run().skip(22, loss=MISSING).kinds() == [("no_updates", "fatal", "open")]
    assert Run().skip(22, loss=math.nan).kinds() == [("nonfinite_forward", "fatal", "open")]


def test_a_probe_at_a_scale_below_1_is_healthy():
    assert Run(scale=0.5).clean(300).skip(1).kinds() == [("growth_probe", "info", "explained")]


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_never_healthy(scale: float):
    run = Run(scale=scale).skip(5)
    assert run.kinds() == [("no_updates", "error", "open")]
    assert run.skip(1).kinds() == [("no_updates", "fatal", "open")]
    assert f"the loss scale is {scale}" in run.findings()[0].headline


def test_the_largest_finite_scale_may_still_come_down():
    assert Run(scale=2.0**127).skip(8).kinds() == [("calibration", "info", "open")]


def at_rates(*rates: float, steps: int = 20, other: float | None = None) -> list[tuple[str, str, str]]:
    run = Run().clean(steps)
    for row in run.rows:
        row["lr"], row["max_abs"] = rates[min(row["attempt"], len(rates) - 1)], 1.0
        if other is not None:
            row["optimizer.0.lr.1"] = other
    return run.kinds()


def test_steps_at_a_learning_rate_of_0_are_told():
    assert at_rates(0.0) == at_rates(0.1, 0.0, steps=21) == [("no_updates", "warning", "open")]
    assert at_rates(0.0, other=0.0) == at_rates(0.0, other=MISSING) == [("no_updates", "warning", "open")]
    assert at_rates(0.0, steps=19) == at_rates(0.0, 0.1, steps=40) == at_rates(0.0, other=0.1) == []
    assert at_rates(*[0.0] * 30, 0.1, steps=40) == []
    assert at_rates(0.1, 0.0, steps=300) == [("no_updates", "warning", "open")]  # of several readings
