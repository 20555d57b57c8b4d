import pytest
from build import Run

TWO = [{"id": 0, "class": "Adam"}, {"id": 1, "class": "SGD"}]


def starving(n: int, scale: float = 2.0**3, other: bool = True) -> Run:
    """`n` attempts in which optimizer 1 is skipped, and optimizer 0 with it or not."""
    run = Run(scale=scale).event("optimizers", optimizers=TWO).clean(100).skip(n)
    for row in run.rows:
        row |= {"stepped": 3, "skipped": 0 if not row["found_inf"] else 2 if other else 3}
    return run


def test_an_optimizer_that_alone_is_skipped_starves_the_other():
    (finding,) = starving(10).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("many_optimizers", "error", 100)
    assert finding.headline.startswith(
        "SGD (optimizer 1) is skipped in every attempt from step 100 on while Adam"
    )


def test_both_skipped_is_no_starvation_and_neither_is_a_scale_above_1():
    assert [f.kind for f in starving(10, other=False).findings()] == ["no_updates"]
    assert [f.severity for f in starving(3).findings()] == ["info"]


def lazy(turns: int, rise: float) -> Run:
    """An ordinary stream of 8 attempts, then one of a lazy stream that is always skipped; the scale rises between."""
    run = Run().event("stream", scaler=0, stream=1, optimizers=[1]).event("optimizers", optimizers=TWO)
    for _ in range(turns):
        run.clean(8).skip(1)
        run.rows[-1]["stream"] = 1
        run.scale *= rise
    return run


@pytest.mark.parametrize(
    ("turns", "rise", "kinds"),
    [(3, 2.0, []), (4, 2.0, ["many_optimizers"]), (12, 4.0, ["many_optimizers"]), (12, 1.0, [])],
)
def test_a_lazy_stream_that_is_always_skipped(turns: int, rise: float, kinds: list[str]):
    assert [f.kind for f in lazy(turns, rise).findings() if f.severity != "info"] == kinds


def periodic(gaps: list[int], interval: int = 8, loss: float = 1.0) -> Run:
    run = Run(interval=interval).clean(40)
    for gap in gaps:
        run.skip(1, loss=loss)
        run.scale *= 2
        run.clean(gap - 1)
        run.scale = 2.0**16
    return run


@pytest.mark.parametrize(
    ("gaps", "kinds"),
    [
        ([16] * 6, ["many_optimizers"]),
        ([16] * 4, []),
        ([16, 16, 17, 16, 16, 16], []),
        ([9] * 8, []),  # a probe after each growth
        ([11] * 6, ["many_optimizers"]),
    ],
)
def test_skips_with_a_period_longer_than_the_growth_interval(gaps: list[int], kinds: list[str]):
    assert [f.kind for f in periodic(gaps).findings() if f.severity != "info"] == kinds


def test_three_periods_are_enough_of_losses_that_stand_out():
    found = [periodic([16] * n, loss=40.0).findings() for n in (3, 4)]
    assert [[f.kind for f in each if f.severity != "info"] for each in found] == [[], ["many_optimizers"]]


@pytest.mark.parametrize(
    ("gap", "loss", "kinds"),
    [
        (10, 40.0, ["many_optimizers"]),  # a period of 10 over an interval of 8
        (10, 1.0, []),  # a probe an attempt late
        (9, 40.0, []),  # where each probe comes
        (10, 3.9, []),  # below 4 times the median before
    ],
)
def test_a_period_just_longer_than_the_growth_interval_counts_where_each_loss_stands_out(
    gap: int, loss: float, kinds: list[str]
):
    found = periodic([gap] * 14, loss=loss).findings()
    assert [(f.kind, f.first_attempt) for f in found if f.severity != "info"] == [(k, 40) for k in kinds]


def test_the_skip_under_way_counts():
    run = periodic([16] * 4).skip(1)
    assert [f.kind for f in run.findings() if f.severity != "info"] == ["many_optimizers"]


def recreated(at: float, initial: float = 2.0**16) -> Run:
    """A scaler that settled at 2^10, and another in its place."""
    run = Run(scale=2.0**10).clean(50)
    run.event("scaler", scaler=1, replaces=0, init_scale=initial).event(
        "stream", scaler=1, stream=1, optimizers=[0]
    )
    run.scale = at
    run.clean(20)
    for row in run.rows[50:]:
        row["stream"] = 1
    return run


def test_a_scaler_made_anew_begins_at_its_initial_scale():
    (finding,) = recreated(2.0**16).findings()
    assert (finding.kind, finding.severity, finding.first_attempt) == ("scaler_state_lost", "warning", 50)
    assert "settled at 2^10 and began at 2^16" in finding.headline


def test_a_scaler_that_goes_on_where_the_last_one_was_is_silent():
    assert recreated(2.0**10).kinds() == []
    assert recreated(2.0**10, initial=2.0**10).kinds() == []


def resumed(scale: float, step: int = 100, restored: bool = False, loss: float = 1.0) -> list[str]:
    """A second producer of the same rank, an hour later."""
    first, second = Run(scale=2.0**10), Run(scale=2.0**16, producer="f" * 32)
    first.clean(loss=[100.0 - i for i in range(91)] + [1.0] * 9)
    second.step, second.scale = step, scale
    if restored:
        second.event("restored", scale=2.0**16, scale_after=scale)
    second.clean(50, loss=loss)
    for run, start in ((first, 0.0), (second, 3600.0)):
        for row in run.rows:
            row["time"] = start + row["attempt"]
    diagnosis = first.diagnosis()
    for batch in second.batches():
        diagnosis.add(batch)
    return [f.kind for f in diagnosis.findings()]


def test_a_resume_without_the_state_of_the_scaler():
    assert resumed(2.0**16) == ["scaler_state_lost"]
    assert resumed(2.0**16, step=0) == ["scaler_state_lost"]  # the loss goes on


def test_a_resume_with_its_state_and_a_run_from_scratch_are_silent():
    assert resumed(2.0**10, restored=True) == []
    assert resumed(2.0**16, restored=True) == []
    assert resumed(2.0**16, step=0, loss=90.0) == []
