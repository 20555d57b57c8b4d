"""A norm that is the scale times what it was, among rows made by hand."""

import numpy as np
import pytest

from ampwatch.diagnosis.jumps import Jump

ROW = np.dtype([("norm", "f8"), ("loss", "f8"), ("scale", "f8"), ("attempt", "i8"), ("step", "i8")])


def steps(n: int = 40, loss: float = 1.0) -> np.ndarray:
    rows = np.zeros(n, ROW)
    rows["norm"], rows["loss"], rows["scale"] = 1.0, loss, 1024.0
    rows["attempt"] = rows["step"] = np.arange(n)
    return rows


@pytest.mark.parametrize("cuts", [[], [50_010], [60_000, 60_002]])
def test_a_jump_late_in_a_long_run_is_found_behind_a_spike_that_was_none(cuts: list[int]) -> None:
    rows, jump = steps(60_010), Jump()
    rows["norm"][50_000] = 100.0
    rows["norm"][60_000:], rows["loss"][60_000:] = 1024.0, 1024.0
    for part in np.split(rows, cuts):
        jump.fold(part)
    assert jump.found is not None
    assert (jump.found.since.attempt, jump.found.way, jump.found.ratio) == (60_000, "times", 1024.0)


def test_a_loss_of_zero_is_no_measure() -> None:
    rows, jump = steps(loss=0.0), Jump()
    rows["norm"][20:] = 1024.0
    jump.fold(rows)
    assert jump.found is None


@pytest.mark.parametrize(("least", "is_found"), [(0.3, True), (1.0, False)])
def test_a_fall_by_the_scale_is_as_noisy_as_the_norms_before_it(least: float, is_found: bool) -> None:
    """The first norm behind it is 1/1024 of three times the usual one."""
    rows, jump = steps(), Jump()
    rows["norm"][1:20:4] = least
    rows["norm"][20:] = 1 / 1024
    rows["norm"][20] = 3 / 1024
    jump.fold(rows)
    assert (jump.found is not None) == is_found
    if jump.found is not None:
        assert (jump.found.since.attempt, jump.found.way, jump.found.ratio) == (20, "by", 3 / 1024)


def test_a_fall_by_something_else_than_the_scale_is_none() -> None:
    """Norms before vary by a factor of 4, and those behind it are 16 times what division by the scale leaves."""
    rows, jump = steps(), Jump()
    rows["norm"][1:20:4] = 0.25
    rows["norm"][20:] = 16 / 1024
    jump.fold(rows)
    assert jump.found is None
