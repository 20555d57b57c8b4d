from build import Run


def rising(n: int, by: float = 1.2) -> list[float]:
    return [by**i for i in range(1, n + 1)]


def test_loss_and_norm_that_grow_before_a_skip_are_divergence():
    run = Run().clean(200).clean(loss=rising(16), norm=rising(16)).skip(1, loss=20.0)
    (finding,) = run.findings()
    assert (finding.kind, finding.severity, finding.state) == ("divergence", "fatal", "open")
    assert 200 <= finding.first_step <= 202
    assert "go back to a checkpoint from before" in finding.headline


def test_before_the_first_skip_it_is_a_warning():
    run = Run().clean(200).clean(loss=rising(16), norm=rising(16))
    assert run.kinds() == [("divergence", "warning", "open")]


def test_loss_alone_is_not_divergence():
    assert Run().clean(200).clean(loss=rising(16)).kinds() == []
    assert Run().clean(200).clean(loss=rising(16), norm=[1.0] * 16).skip().kinds() == [
        ("growth_probe", "info", "explained")
    ]


def test_growth_within_4_times_the_99th_percentile_is_not():
    assert Run().clean(200).clean(loss=rising(7), norm=rising(7)).kinds() == []


def test_a_spike_that_falls_again_is_healthy():
    spike = [9.0, 8.0, 6.0, 4.0, 2.0, *[1.0] * 30]
    run = Run().clean(200).skip(1, loss=9.0).clean(loss=spike, norm=spike)
    assert run.kinds() == [("growth_probe", "info", "explained")]


def test_a_loss_that_ends_in_nan_after_it_diverged_has_one_headline():
    run = Run().clean(200).clean(loss=rising(16), norm=rising(16)).broken(12)
    (finding,) = run.findings()
    assert finding.kind == "divergence"
    assert any("not finite since step 216" in e.text for e in finding.evidence)


def test_it_has_recovered_once_the_loss_is_back():
    run = Run().clean(200).clean(loss=rising(16), norm=rising(16)).skip(1, loss=20.0).clean(40)
    assert run.kinds() == [("divergence", "fatal", "recovered")]


def test_divergence_in_a_short_run_is_seen():
    run = Run().clean(loss=rising(30, 1.3), norm=rising(30, 1.3)).skip(1, loss=3000.0)
    assert run.kinds() == [("divergence", "fatal", "open")]
