from build import Run


def after(*losses: float, before: int = 40) -> list[tuple[str, str, str]]:
    return Run().clean(before).clean(loss=list(losses)).kinds()


def test_a_loss_that_stands_out_and_comes_back_is_a_spike():
    run = Run().clean(40).clean(loss=[5.0, 40.0, 9.0]).clean(30)
    (finding,) = run.findings()
    assert (finding.kind, finding.severity, finding.state) == ("spike", "info", "recovered")
    assert (finding.first_attempt, finding.last_attempt) == (40, 43)
    assert finding.headline.startswith("The loss was 40 × the largest of the 64 before it at step 40.")
    assert finding.headline.endswith("It recovered at step 43.")


def test_it_is_said_at_once_and_is_open_until_the_loss_is_back():
    assert after(5.0) == [("spike", "info", "open")]
    assert after(5.0, 2.5) == [("spike", "info", "open")]
    assert after(5.0, 1.9) == [("spike", "info", "recovered")]


def test_a_new_level_a_slow_rise_and_a_loss_of_nothing_are_none():
    assert after(*[5.0] * 9) == []
    assert after(2.0, 4.0, 7.9, 1.0) == []
    assert after(3.9, 1.0) == []
    assert after(5.0, 1.0, before=15) == []
    assert Run().clean(40, loss=0.0).clean(loss=[1.0]).clean(9, loss=0.0).kinds() == []
    assert Run().clean(40, loss=-1.0).clean(loss=[9.0]).clean(9, loss=-1.0).kinds() == []


def test_several_are_one_finding():
    run = Run().clean(40).clean(loss=[5.0]).clean(70).clean(loss=[9.0]).clean(70).clean(loss=[7.0])
    (finding,) = run.findings()
    assert (finding.state, finding.first_attempt, finding.last_attempt) == ("open", 40, 182)
    assert finding.evidence[1].text == "Seen 3 times, the last time at step 182."


def test_a_loss_that_came_back_in_attempts_that_were_lost_is_not_known():
    run = Run().clean(40).clean(loss=[5.0]).clean(10)
    del run.rows[41:45]
    assert run.kinds() == []
