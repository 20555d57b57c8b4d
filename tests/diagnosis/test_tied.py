"""A loss that falls with the loss scale through skipped attempts, among rows made by hand."""

import numpy as np
import pytest

from ampwatch.diagnosis.rows import ROW, Rows
from ampwatch.diagnosis.tied import Tied


def descent(losses: list[float], scale: float = 2.0**16) -> Rows:
    """Skipped attempts, each at half the scale of the one before."""
    rows = np.zeros(len(losses), ROW)
    rows["attempt"], rows["loss"], rows["skipped"] = np.arange(len(losses)), losses, True
    rows["scale"] = scale / 2.0 ** np.arange(len(losses))
    return rows


def tied_to(rows: Rows, *cuts: int) -> tuple[int, int, float] | None:
    tied = Tied()
    for part in np.split(rows, cuts):
        tied.fold(part)
    return tied.found and (tied.found.since.attempt, tied.found.attempts, tied.found.loss_last)


FALLING = [2.0 * 2**-i * (1.3 if i % 2 else 1.0) for i in range(8)]


@pytest.mark.parametrize("cuts", [(), (3,), (1, 5, 6)])
def test_a_loss_that_is_halved_with_the_scale(cuts: tuple[int, ...]) -> None:
    assert tied_to(descent(FALLING), *cuts) == (0, 6, FALLING[5])
    assert tied_to(descent([1.0, 1.0, *FALLING]), *cuts) == (2, 6, FALLING[5])


def test_a_loss_that_stays_or_falls_more_slowly_is_none() -> None:
    assert tied_to(descent([1.0] * 30)) is None
    assert tied_to(descent([0.7**i for i in range(30)])) is None
    assert tied_to(descent([0.0, *[np.nan] * 9])) is None


def test_a_fall_of_five_attempts_is_none() -> None:
    assert tied_to(descent(FALLING[:5])) is None


@pytest.mark.parametrize("change", [{"skipped": False}, {"penalised": True}, {"stepped": 2, "skips": 1}])
def test_a_step_of_any_optimizer_or_a_penalty_ends_it(change: dict[str, int]) -> None:
    rows = descent(FALLING)
    for name, value in change.items():
        rows[name][4] = value
    assert tied_to(rows) is None
