import pytest
from build import Run


@pytest.mark.parametrize(
    ("fault", "raised", "kind"),
    [
        ("unscale_twice", True, "call_order"),
        ("step_twice", True, "call_order"),
        ("update_without_step", True, "call_order"),
        ("unscale_in_accumulation", False, "call_order"),
        ("missing_update", False, "call_order"),
        ("step_without_scale", True, "call_order"),
        ("step_without_scale", False, "scaler_bypassed"),
        ("step_outside_scaler", False, "scaler_bypassed"),
        ("step_after_unscale", False, "scaler_bypassed"),
        ("unscaled_step", False, "scaler_bypassed"),
        ("unscaled_backward", False, "scaler_bypassed"),
        ("divided_by_hand", False, "scaler_bypassed"),
        ("stepped_again", False, "scaler_bypassed"),
        ("scale_without_step", False, "scaler_bypassed"),
        ("step_after_update", False, "call_order"),
    ],
)
def test_each_fault_has_its_kind(fault: str, raised: bool, kind: str):
    run = (
        Run().clean(3).event("call_fault", fault=fault, optimizer=0, order=["scale"], raised=raised).clean(3)
    )
    (finding,) = run.findings()
    assert (finding.kind, finding.severity, finding.first_step) == (kind, "error", 3)


def test_the_optimizer_is_named_and_the_order_shown():
    run = Run().event("optimizers", optimizers=[{"id": 0, "class": "AdamW"}]).clean(3)
    run.event(
        "call_fault",
        fault="unscale_twice",
        optimizer=0,
        order=["scale", "unscale_:0", "unscale_:0"],
        raised=True,
    )
    (finding,) = run.clean(1).findings()
    assert "unscale_() was called twice for AdamW" in finding.headline
    assert finding.evidence[0].text == (
        "Seen 1 time: unscale_() was called twice for AdamW before update(). Calls: scale → unscale_:0 → unscale_:0."
    )


def test_what_follows_a_wrong_order_is_its_evidence():
    run = Run().event("call_fault", fault="update_in_accumulation", optimizer=0, order=[], raised=False)
    (finding,) = run.clean(20).broken(8).findings()
    assert finding.kind == "call_order"
    assert any("not finite" in e.text for e in finding.evidence)


def test_several_faults_of_a_loop_are_one_finding():
    run = Run().clean(1)
    for fault in ("step_twice", "update_without_step", "step_twice"):
        run.event("call_fault", fault=fault, optimizer=0, order=[], raised=True)
    (finding,) = run.findings()
    assert "step() was called twice" in finding.headline
    assert [e.value for e in finding.evidence] == [2, 1]


def test_a_job_that_ended_before_its_first_update_is_judged():
    run = Run().event("call_fault", fault="unscale_twice", optimizer=0, order=[], raised=True)
    verdict = run.diagnosis().verdict()
    assert (verdict.word, verdict.kind, verdict.first_step) == ("failing", "call_order", 0)


def windows(residue: int, parts: int = 2) -> Run:
    """Windows that are unscaled in each of their parts, and stepped in the last."""
    run = Run().clean(4 * parts)
    for i, row in enumerate(run.rows):
        row["stepped"] = int(i % parts == parts - 1)
        row["residue"] = residue if i % parts else 0
    return run


def test_gradients_that_are_unscaled_in_each_part_of_a_window():
    (finding,) = windows(residue=1).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("call_order", "error", 1)
    assert "divided by the scale once more" in finding.headline


def test_steps_that_the_loop_leaves_out_are_healthy_where_gradients_are_cleared():
    assert windows(residue=0).kinds() == []


def jumped(norm: float, loss: float, n: int = 5) -> list[tuple[str, str, int]]:
    """Steps at 2^10 whose norm and loss are so many times what they were."""
    run = Run(scale=2.0**10).clean(30).clean(loss=[loss] * n, norm=[norm] * n)
    return [(f.kind, f.severity, f.first_attempt) for f in run.findings() if f.severity != "info"]


@pytest.mark.parametrize(
    ("norm", "loss", "told"),
    [
        (1024.0, 1024.0, True),
        (1 / 1024, 1.0, True),
        (1024.0, 1.0, False),
        (100.0, 100.0, False),
        (1.0, 1024.0, False),
    ],
)
def test_a_norm_that_is_the_scale_times_what_it_was(norm: float, loss: float, told: bool):
    assert jumped(norm, loss) == ([("scaler_bypassed", "error", 30)] if told else [])
    assert jumped(norm, loss, n=4) == []
