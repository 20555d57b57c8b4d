import pytest
from build import Run


def held(n: int, scale: float = 128.0, loss: float = 1.0) -> Run:
    """`n` skips at a minimum of the scale."""
    run = Run(scale=scale).clean(500)
    for _ in range(n):
        run.skip(loss=loss)
        run.scale = scale
    return run


@pytest.mark.parametrize(
    ("n", "kinds"),
    [
        (4, [("spike", "info", "open")]),
        (5, [("scale_floor", "error", "open")]),
        (9, [("scale_floor", "error", "open")]),
        (10, [("scale_floor", "fatal", "open")]),
    ],
)
def test_skips_at_a_minimum_are_told_at_5_and_fatal_at_10(n: int, kinds: list[tuple[str, str, str]]):
    assert held(n).kinds() == kinds


def test_a_minimum_of_1_is_told_as_such_and_never_less_severely():
    severities = [[f.severity for f in held(n, scale=1.0).findings()] for n in range(1, 12)]
    assert severities == [["info"]] * 2 + [["error"]] * 3 + [["fatal"]] * 6
    assert [f.kind for f in held(7, scale=1.0).findings()] == ["scale_floor"]


def test_hysteresis_of_2_is_no_floor():
    run = Run().clean(50)
    for _ in range(6):
        run.skip()
        run.scale *= 2
        run.skip()
    assert "scale_floor" not in [f.kind for f in run.findings()]


def test_a_floor_that_a_broken_loss_holds_is_its_evidence():
    (finding,) = held(12, loss=float("nan")).findings()
    assert finding.kind == "nonfinite_forward"
    assert any("held at 2^7" in e.text for e in finding.evidence)


def test_a_scale_set_by_hand_between_attempts_does_not_end_the_run():
    run = Run(scale=128.0).clean(5)
    for _ in range(10):
        run.skip()
        run._row(1.0, 1.0, 128.0, found_inf=0, n_inf=0)
        run.rows[-1] |= {"stepped": 0, "numel": 0, "losses": 0}
    for row in run.rows:
        row.setdefault("stepped", 1)
    (finding,) = run.findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("scale_floor", "fatal", 5)


def test_what_ended_is_not_told():
    assert [k for k, *_ in held(12).clean(5).kinds()] == ["spike"]
