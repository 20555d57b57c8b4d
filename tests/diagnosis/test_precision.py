from build import Run


def test_a_scaler_with_bfloat16_autocast_is_useless():
    (finding,) = Run().event("autocast", dtype="bfloat16", device="cuda").clean(1).findings()
    assert (finding.kind, finding.severity, finding.confidence) == ("useless_scaler", "warning", 1.0)


def test_with_float16_autocast_or_float16_gradients_it_is_not():
    assert Run().event("autocast", dtype="float16", device="cuda").clean(1).kinds() == []
    run = Run().event("autocast", dtype="float32", device="cpu").event("origin", origins={"0": "float16"})
    assert run.clean(1).kinds() == []


def test_three_growths_without_an_overflow_and_bfloat16_gradients():
    run = Run(interval=10).event("origin", origins={"0": "bfloat16"})
    assert run.clean(29).kinds() == []
    (finding,) = run.clean(1).findings()
    assert (finding.kind, finding.first_attempt) == ("useless_scaler", 9)


def test_an_overflow_says_that_it_is_of_use():
    run = Run(interval=10).event("origin", origins={"0": "bfloat16"}).clean(30).skip().clean(9)
    assert run.kinds() == [("growth_probe", "info", "explained")]


def test_a_scaler_that_is_off_is_not_judged():
    run = Run().event("autocast", dtype="bfloat16", device="cuda").event("scaler", scaler=0, enabled=False)
    assert run.clean(1).kinds() == []


def test_beside_a_fatal_fault_it_is_evidence():
    run = Run().event("autocast", dtype="bfloat16", device="cuda").clean(10).broken(3)
    assert [f.kind for f in run.findings()] == ["nonfinite_forward"]
