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
    assert run.kinds() == [("spike", "info", "recovered")]


def test_a_loss_that_ends_in_nan_after_it_diverged_has_one_headline():
    run = Run().clean(200).clean(loss=rising(16), norm=rising(16)).broken(12)
    (finding,) = run.findings()
    assert finding.kind == "divergence"
    assert any("not finite from step 216 on" in e.text for e in finding.evidence)


def test_it_has_recovered_once_the_loss_is_back():
    run = Run().clean(200).clean(loss=rising(16), norm=rising(16)).skip(1, loss=20.0).clean(40)
    assert run.kinds() == [("divergence", "fatal", "recovered")]


def test_divergence_in_a_short_run_is_seen():
    run = Run().clean(loss=rising(30, 1.3), norm=rising(30, 1.3)).skip(1, loss=3000.0)
    assert run.kinds() == [("divergence", "fatal", "open")]


def leaping(*losses: float, before: int = 60, norm: float = 10.0) -> Run:
    """Attempts at a loss of 1, then a step taken at each loss but the last, which is skipped."""
    taken = list(losses[:-1])
    return Run().clean(before).clean(loss=taken, norm=[norm] * len(taken)).skip(1, loss=losses[-1])


def test_three_steps_that_leap_are_divergence_at_the_next_skip():
    run = leaping(2.5, 6.0, 14.0).broken(8)
    (finding,) = run.findings()
    assert (finding.kind, finding.severity, finding.first_step) == ("divergence", "fatal", 60)
    assert any("not finite from" in e.text for e in finding.evidence)


def test_skips_between_the_leaps_change_nothing():
    run = leaping(4.0, 40.0).skip(1, loss=35.0).clean(loss=[38.0], norm=[20.0]).skip(1, loss=7000.0)
    assert [f.kind for f in run.findings() if f.severity != "info"] == ["divergence"]


def test_what_is_less_than_three_leaps_is_not():
    quiet = [("spike", "info", "recovered")]
    assert leaping(1.0, 4.0, 30.0).clean(20).kinds() == quiet  # two
    assert leaping(2.5, 4.0, 14.0).clean(20).kinds() == quiet  # one of less than 1.75 ×
    assert leaping(1.9, 3.8, 7.0).clean(20).kinds() == quiet  # of less than 8 × in all
    assert leaping(2.5, 6.0, 14.0, norm=3.9).clean(20).kinds() == quiet  # the norm is within 4 ×
    assert leaping(2.5, 6.0, 14.0, before=20).clean(20).kinds() == quiet  # no percentiles yet


def test_two_leaps_are_divergence_once_a_loss_a_thousand_times_larger_stays():
    def hurled(loss: float, skips: int) -> list[str]:
        run = Run().clean(60).clean(loss=[14.0], norm=[10.0]).skip(skips, loss=loss)
        return [f.kind for f in run.findings() if f.severity != "info"]

    assert hurled(1e5, 3) == hurled(1e5, 8) == ["divergence"]
    assert hurled(1e5, 2) == hurled(900.0, 3) == []


def test_a_wild_batch_at_the_same_weights_is_no_leap():
    run = Run().clean(60).clean(loss=[2.5, 6.0], norm=[10.0] * 2)
    assert run.skip(1, loss=14.0).kinds()[0][0] == "divergence"
    run = Run().clean(60).clean(loss=[2.5, 6.0], norm=[10.0] * 2).skip(1, loss=6.0).skip(1, loss=14.0)
    assert run.clean(20).kinds() == [("spike", "info", "recovered")]


def test_a_skip_far_below_the_highest_clean_scale_stands_for_the_norm():
    run = leaping(2.5, 6.0, 14.0, norm=3.9)
    assert run.skip(2, loss=14.0).kinds() == [
        ("spike", "info", "open")
    ]  # at 2^15 and 2^14, a quarter of 2^16
    assert run.skip(1, loss=14.0).kinds() == [("divergence", "fatal", "open")]
    (finding,) = run.findings()
    assert "gradients overflow at loss scale 2^13, where 2^16 was clean" in finding.headline


def test_a_loss_that_breaks_is_a_leap_of_its_own():
    def broke(*losses: float) -> list[str]:
        run = Run().clean(60).clean(loss=list(losses), norm=[10.0] * len(losses)).broken(8)
        return [f.kind for f in run.findings() if f.severity != "info"]

    assert broke(4.0, 14.0) == ["divergence"]
    assert broke(14.0) == broke(2.0, 7.0) == ["nonfinite_forward"]


def young(first: int, thrown: float, skips: int) -> Run:
    """Attempts at a loss of 1, a step that makes it so much larger, and skips at these weights."""
    return Run().clean(first, norm=2.0).skip(skips, loss=thrown)


def test_in_the_first_steps_a_loss_that_stays_100_times_larger_is_divergence():
    def loud(run: Run) -> list[str]:
        return [f.kind for f in run.findings() if f.severity != "info"]

    assert loud(young(1, 300.0, 4)) == loud(young(9, 300.0, 9)) == ["divergence"]
    assert loud(young(1, 300.0, 3)) == loud(young(1, 90.0, 9)) == []
    assert loud(young(1, 9.0, 4).broken(4)) == ["divergence"]
    assert loud(young(1, 7.0, 4).broken(4)) == loud(young(1, 9.0, 1).broken(4)) == ["nonfinite_forward"]


def test_of_a_young_stream_no_percentiles_are_told():
    (finding,) = young(1, 300.0, 4).findings()
    assert finding.evidence[0].text == "The loss rose to 300; it was at most 1."
    assert "gradients overflow at loss scale 2^13, where 2^16 was clean" in finding.headline


def by_rate(name: str, lr: float, steps: int = 1) -> list[str]:
    run = Run().event("optimizers", optimizers=[{"id": 0, "class": name}]).clean(steps).broken(4)
    for row in run.rows:
        row["lr"] = lr
    return [f.kind for f in run.findings()]


def test_an_optimizer_that_moves_weights_by_its_rate_throws_them():
    assert by_rate("AdamW", 3.0) == by_rate("Lion", 0.5, steps=3) == ["divergence"]
    quiet = ["nonfinite_forward"]
    assert by_rate("AdamW", 0.1) == by_rate("SGD", 3.0) == by_rate("AdamW", 3.0, steps=4) == quiet
