from build import Run


def test_descent_from_2_32_is_explained():
    run = Run(scale=2.0**32).skip(11).clean(100)
    (finding,) = run.findings()
    assert (finding.kind, finding.severity, finding.state) == ("calibration", "info", "explained")
    assert (finding.first_attempt, finding.last_attempt) == (0, 10)
    assert "from 2^32 to 2^21 in 11 skipped attempts" in finding.headline


def test_descent_is_open_while_no_step_was_taken():
    (finding,) = Run().skip(15).findings()
    assert (finding.kind, finding.state) == ("calibration", "open")


def test_a_few_skips_after_the_first_step_belong_to_the_descent():
    run = Run(scale=2.0**20).skip(4).clean(3).skip(1).clean(20).skip(2).clean(200)
    assert run.kinds() == [("calibration", "info", "explained")]
    assert "in 7 skipped attempts, step 0 to step 23 (attempt 29)" in run.findings()[0].headline


def test_descent_to_1_is_no_calibration_any_more():
    assert [f.kind for f in Run().skip(16).findings()] == []  # the next attempt is the first at a scale of 1
    assert [f.kind for f in Run().skip(17).findings()] == ["no_updates"]


def test_one_skip_after_each_growth_is_ordinary():
    run = Run(interval=200).clean(200)
    for _ in range(6):
        run.skip().clean(200)
    (finding,) = run.findings()
    assert (finding.kind, finding.severity) == ("growth_probe", "info")
    assert "6 skipped attempts" in finding.headline


def test_two_skips_in_a_row_are_a_probe_and_three_are_a_spike():
    assert Run().clean(500).skip(2).clean(9).kinds() == [("growth_probe", "info", "explained")]
    assert Run().clean(500).skip(3).clean(9).kinds() == [("spike", "info", "recovered")]


def test_a_probe_stands_within_a_quarter_of_the_highest_clean_scale():
    run = Run().clean(500).skip(2).clean(100)
    assert [f.kind for f in run.skip(1).clean(9).findings()] == ["growth_probe"]  # at 2^14, a quarter of 2^16
    assert [f.kind for f in run.skip(1).clean(9).findings()] == ["growth_probe", "spike"]  # at 2^13


def test_more_than_ten_probes_in_five_intervals_are_not_ordinary():
    run = Run(interval=50).clean(200)
    for _ in range(10):
        run.skip().clean(1)
        run.scale *= 2
    assert [f.kind for f in run.findings()] == ["growth_probe"]
    assert [f.kind for f in run.skip().clean(1).findings()] == ["growth_probe", "spike"]


def test_a_skip_long_after_the_first_step_is_not_of_the_descent():
    assert [f.kind for f in Run().skip(4).clean(31).skip(1).clean(20).findings()] == [
        "growth_probe",
        "calibration",
    ]
    assert [f.kind for f in Run().skip(4).clean(31).skip(4).clean(20).findings()] == ["calibration", "spike"]


def test_without_a_descent_a_few_skips_are_none():
    assert Run().clean(10).skip(1).clean(20).kinds() == [("growth_probe", "info", "explained")]
    assert Run().clean(10).skip(3).clean(20).kinds() == [("spike", "info", "recovered")]


def test_a_descent_is_told_in_attempts_where_no_step_was_taken():
    assert "attempts 0 to 10. Healthy" in Run(scale=2.0**32).skip(11).clean(9).findings()[0].headline
