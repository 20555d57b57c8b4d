import pytest
from build import Run


def windows(
    exponent: float, odd: int = 3, noise: tuple[float, ...] = (1.0,), lengths: tuple[int, int] = (4, 2)
) -> list[str]:
    """Windows of 4 micro-batches, every 6th of 2, whose norm goes with the length to a power."""
    run = Run()
    for i in range(6 * odd):
        length = lengths[i % 6 == 5]
        run.clean(1, norm=float(length) ** exponent * noise[i % len(noise)])
        run.rows[-1] |= {"micro_batches": length, "losses": length}
    return [f.kind for f in run.findings()]


@pytest.mark.parametrize(
    ("exponent", "kinds"),
    [(1.0, ["accumulation"]), (0.75, ["accumulation"]), (0.5, []), (0.0, []), (-0.5, []), (1.5, [])],
)
def test_a_sum_goes_with_a_power_of_about_1(exponent: float, kinds: list[str]):
    assert windows(exponent, odd=6) == kinds


def turns(exponent: float, n: int, noise: tuple[float, ...] = (1.0,)) -> list[str]:
    """Windows of 2, 6 and 3 micro-batches in turn."""
    run = Run()
    for i in range(n):
        length = (2, 6, 3)[i % 3]
        run.clean(1, norm=float(length) ** exponent * noise[i % len(noise)])
        run.rows[-1] |= {"micro_batches": length, "losses": length}
    return [f.kind for f in run.findings()]


@pytest.mark.parametrize(("exponent", "kinds"), [(1.0, ["accumulation"]), (0.5, []), (0.0, []), (-0.5, [])])
def test_no_length_needs_to_be_common(exponent: float, kinds: list[str]):
    assert turns(exponent, 30, noise=(1.1, 0.9, 1.0, 0.95)) == kinds
    assert turns(1.0, 10) == ["accumulation"]


def test_what_is_proven_stays_so_until_later_windows_show_a_mean():
    def told(then: float, noise: tuple[float, ...]) -> list[str]:
        run = Run()
        for i in range(90):
            length, power = (2, 6, 3, 1, 4)[i % 5], 1.0 if i < 30 else then
            run.clean(1, norm=float(length) ** power * (noise[i % len(noise)] if i >= 30 else 1.0))
            run.rows[-1] |= {"micro_batches": length, "losses": length}
        return [f.kind for f in run.findings()]

    assert told(1.0, (0.02, 60.0, 1.0, 0.03, 40.0, 2.0, 0.05, 70.0)) == ["accumulation"]
    assert told(0.0, (1.1, 0.9, 1.0, 0.95)) == []


def test_three_windows_of_another_length_are_wanted():
    assert [windows(1.0, odd=n) for n in (2, 3)] == [[], ["accumulation"]]


def test_norms_that_vary_much_prove_nothing():
    assert windows(0.0, odd=6, noise=(1.0, 8.0, 0.2, 3.0, 0.5)) == []


def test_one_length_tells_nothing():
    assert windows(1.0, odd=6, lengths=(4, 4)) == []


def below_one(n: int, losses: tuple[float, float], first: float = 1.0) -> list[str]:
    """The scale comes down from `first` by one skip, and n steps follow."""
    run = (
        Run(scale=first)
        .skip()
        .clean(loss=[losses[0] + (losses[1] - losses[0]) * i / n for i in range(n)], norm=[1.0] * n)
    )
    return [f.kind for f in run.findings() if f.kind == "summed_loss"]


def test_a_scale_that_was_set_below_1_says_nothing_of_the_loss():
    assert below_one(100, (9.0, 8.0), first=0.5) == []


@pytest.mark.parametrize(
    ("n", "losses", "kinds"),
    [(99, (9.0, 8.0), []), (100, (9.0, 8.0), ["summed_loss"]), (100, (8.0, 9.0), [])],
)
def test_a_hundred_steps_below_1_with_a_falling_loss(n: int, losses: tuple[float, float], kinds: list[str]):
    assert below_one(n, losses) == kinds


def test_a_scale_of_1_is_not_below_it():
    run = Run(scale=1.0).clean(loss=[9.0 - 0.01 * i for i in range(200)], norm=[1.0] * 200)
    assert run.kinds() == []


def samples(worst: int, largest: float, over: int) -> list[str]:
    """A tensor that loses some of 1000 elements, beside one that reaches far up, in samples over so many attempts."""
    run = Run().event("origin", attempt=0, origins={"0": "float16", "1": "float16"})
    for _ in range(over // 10 + 1):
        run.clean(10)
        run.tensor({-24: 300, -23: 200, -22: 130}, zeros=worst).tensor({0: 400}, tensor=1, max_abs=largest)
    return [f.kind for f in run.findings()]


@pytest.mark.parametrize(
    ("worst", "largest", "over", "kinds"),
    [
        (600, 50000.0, 50, ["narrow_range"]),
        (600, 50000.0, 20, []),
        (600, 30.0, 50, ["underflow"]),
        (10, 50000.0, 50, []),
    ],
)
def test_a_scale_that_can_neither_stay_nor_grow(worst: int, largest: float, over: int, kinds: list[str]):
    assert samples(worst, largest, over) == kinds


def test_a_sample_with_too_little_left_to_fit_neither_proves_nor_refutes():
    def kinds(last: dict[int, int], zeros: int) -> list[str]:
        run = Run().event("origin", attempt=0, origins={"0": "float16", "1": "float16"})
        for i in range(7):
            run.clean(10).tensor({0: 400}, tensor=1, max_abs=50000.0)
            run.tensor(last if i == 6 else {-24: 300, -23: 200, -22: 130}, zeros=zeros if i == 6 else 600)
        return [f.kind for f in run.findings()]

    assert kinds({-24: 20}, zeros=1210) == ["narrow_range"]
    assert kinds({-10: 1230}, zeros=0) == []


def test_a_scale_below_1_is_not_called_healthy_beside_it():
    run = Run(interval=10**6).event("origin", attempt=0, origins={"0": "float16", "1": "float16"}).skip(19)
    for i in range(15):
        run.clean(loss=[9.0 - 0.01 * (10 * i + j) for j in range(10)])
        run.tensor({-24: 300, -23: 200, -22: 130}, zeros=600).tensor({0: 400}, tensor=1, max_abs=50000.0)
    assert [f.kind for f in run.findings()] == ["narrow_range", "calibration"]


@pytest.mark.parametrize(("scale", "kinds"), [(0.5, ["narrow_range"]), (2.0, [])])
def test_below_1_less_is_enough(scale: float, kinds: list[str]):
    run = Run(scale=scale, interval=10**6).event(
        "origin", attempt=0, origins={"0": "float16", "1": "float16"}
    )
    for _ in range(5):
        run.clean(10).tensor({-24: 90, -23: 180, -22: 600}, zeros=100).tensor({0: 40}, tensor=1, max_abs=5e4)
    assert [f.kind for f in run.findings()] == kinds


def vanished(before: float) -> list[str]:
    """A tensor that was so large at a scale of 2^16 is zero at 2^4, beside one that allows no larger scale."""
    run = Run().event("origin", attempt=0, origins={"0": "float16"}).clean(1)
    run.tensor({-16: 400}, max_abs=before).tensor({0: 400}, tensor=1, max_abs=1.0).skip(12)
    for _ in range(5):
        run.clean(10).tensor({}, zeros=400, max_abs=0.0).tensor({0: 400}, tensor=1, max_abs=50000.0)
    return [f.kind for f in run.findings() if f.severity != "info"]


def test_a_tensor_that_the_scale_brought_below_float16_has_vanished():
    assert [vanished(2.0**-14), vanished(2.0**-5)] == [["narrow_range"], []]


def test_a_scale_that_overflowed_a_step_higher_cannot_be_raised():
    run = Run(interval=1000).event("origin", attempt=0, origins={"0": "float16"}).clean(200).skip(1)
    run.event("skip", attempt=200, tensors=[7])
    for _ in range(6):
        run.clean(10).tensor({-24: 300, -23: 200, -22: 130}, zeros=600)
    (finding,) = [f for f in run.findings() if f.severity != "info"]
    assert (finding.kind, "tensor 7 overflows" in finding.headline) == ("narrow_range", True)
