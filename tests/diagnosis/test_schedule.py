import pytest
from build import Run


def scheduled(run: Run, rates: list[float] | None = None) -> Run:
    """Learning rates by attempt: given, else falling with every attempt."""
    for i, row in enumerate(run.rows):
        row["lr"] = rates[min(i, len(rates) - 1)] if rates else 1.0 / (1 + i)
    return run


def probing(skips: int) -> Run:
    run = Run().clean(150)
    for _ in range(skips):
        run.skip(1).clean(40)
        run.scale = 2.0**16
    return scheduled(run)


@pytest.mark.parametrize(("skips", "severity"), [(1, "info"), (10, "info"), (11, "warning")])
def test_more_than_ten_steps_and_a_hundredth_ahead_is_a_warning(skips: int, severity: str):
    (finding,) = [f for f in probing(skips).findings() if f.kind == "schedule_ahead"]
    assert (finding.severity, f"is {skips} step" in finding.headline) == (severity, True)


def test_skips_of_the_descent_make_no_warning():
    run = scheduled(Run(scale=2.0**32).skip(15).clean(50))
    assert [(f.kind, f.severity) for f in run.findings()] == [
        ("schedule_ahead", "info"),
        ("calibration", "info"),
    ]


def test_a_schedule_that_waits_or_goes_by_epochs_is_silent():
    run = Run(scale=2.0**32).skip(15).clean(50)
    waiting = [1.0] * 16 + [1.0 / (1 + i) for i in range(50)]
    assert [f.kind for f in scheduled(run, waiting).findings()] == ["calibration"]
    by_epoch = [1.0] * 3 + [0.5] * 30 + [0.1] * 40
    assert [f.kind for f in scheduled(run, by_epoch).findings()] == ["calibration"]


def warmed_up(steps: int) -> list[str]:
    """15 skips of the descent, a warm-up of so many steps, then a slow decay."""
    rates = [(i + 1) / steps for i in range(steps)] + [1.0 - 0.001 * i for i in range(80)]
    run = scheduled(Run(scale=2.0**32).skip(15).clean(60), rates)
    return [f.severity for f in run.findings() if f.kind == "schedule_ahead"]


def test_a_warm_up_that_was_over_before_it_began():
    assert [warmed_up(10), warmed_up(16), warmed_up(30)] == [["warning"], ["info"], ["info"]]


def test_a_schedule_that_ends_early_goes_by_steps_all_the_same():
    run = scheduled(Run(scale=2.0**32).skip(15).clean(200), [(i + 1) / 10 for i in range(10)])
    (finding,) = [f for f in run.findings() if f.kind == "schedule_ahead"]
    assert (finding.severity, "over before the first step" in finding.headline) == ("warning", True)
