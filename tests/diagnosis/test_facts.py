import random
import tracemalloc

import numpy as np
import pytest

from ampwatch.diagnosis.rows import Ledger
from ampwatch.diagnosis.samples import NEWEST, SAMPLE, Samples
from ampwatch.diagnosis.sketch import Sketch
from ampwatch.diagnosis.steps import BLOCK, Steps
from ampwatch.diagnosis.underflow import shape_of


def test_a_percentile_is_right_within_a_sixteenth_of_an_octave():
    values = np.linspace(-100, 1000, 10_001)
    sketch = Sketch()
    sketch.add(values[:7000])
    for q in (1, 50, 99):
        assert sketch.percentile(q, values[7000:]) == pytest.approx(np.percentile(values, q), rel=0.045)


def test_what_waits_to_be_counted_holds_no_more_than_itself():
    sketch = Sketch()
    for start in range(0, 1000, 10):
        sketch.add(np.arange(start * 1000.0, (start + 10) * 1000).reshape(-1, 4)[:10, 2])
    assert sum(each.base is not None for each in sketch._waiting) == 0
    assert sketch.percentile(100, np.empty(0)) == pytest.approx(990_000, rel=0.045)


def test_zeros_and_what_is_not_finite():
    sketch = Sketch()
    assert np.isnan(sketch.percentile(50, np.array([np.nan, np.inf])))
    sketch.add(np.array([0.0, 0.0, 1.0, np.nan]))
    assert sketch.percentile(50, np.empty(0)) == 0.0


def table(*attempts: int) -> dict[str, np.ndarray]:
    return {"attempt": np.array(attempts), "scale": np.ones(len(attempts)), "step": np.array(attempts) * 10}


def test_rows_in_order_are_taken_once():
    ledger = Ledger()
    ledger.add(table(0, 1))
    assert [r["attempt"].tolist() for r in [ledger.take()[0], ledger.take()[0]]] == [[0, 1], []]
    ledger.add(table(2))
    rows, again = ledger.take()
    assert (rows["attempt"].tolist(), again) == ([2], False)


def test_a_late_row_gives_all_again():
    ledger = Ledger()
    ledger.add(table(0, 3))
    ledger.take()
    ledger.add(table(2, 1))
    rows, again = ledger.take()
    assert (rows["attempt"].tolist(), again) == ([0, 1, 2, 3], True)


def test_the_step_of_an_attempt_without_a_row_follows_the_row_before():
    ledger = Ledger()
    ledger.add(table(4, 6))
    ledger.take()
    assert [ledger.step_of(a) for a in (3, 4, 5, 6, 9)] == [3, 40, 41, 60, 61]


def test_what_a_ledger_has_forgotten_comes_no_more_and_keeps_its_steps():
    ledger = Ledger()
    ledger.add(table(0, 3, 4, 5))
    ledger.take()
    ledger.forget(3)
    ledger.add(table(2, 4, 6))
    rows, again = ledger.take()
    assert (rows["attempt"].tolist(), again) == ([4, 5, 6], True)
    assert (ledger.forgotten, ledger.missing, ledger.first_missing) == (3, 2, 1)
    assert [ledger.step_of(a) for a in (0, 1, 2, 3, 4)] == [0, 1, 1, 30, 40]


def test_steps_of_long_ago_are_exact_and_take_next_to_nothing():
    attempts = np.arange(3 * BLOCK)
    skipped = attempts % 500 == 7
    rows = np.zeros(len(attempts), dtype=[("attempt", "<i8"), ("step", "<i8"), ("taken", "?")])
    rows["attempt"], rows["step"], rows["taken"] = attempts, attempts - np.cumsum(skipped) + skipped, ~skipped
    steps, before = Steps(), np.delete(rows, [900, 8001])
    for part in np.array_split(before, 50):
        steps.add(part)
    assert [steps.of(a) for a in range(0, len(attempts), 97)] == rows["step"][::97].tolist()
    assert [steps.of(a) for a in (-1, 900, 8001)] == [-1, 898, 7985]
    assert sum(map(len, steps._packed)) < 0.1 * len(attempts)


def test_a_trace_without_found_inf_takes_a_scale_that_fell_for_a_skip():
    ledger = Ledger()
    ledger.add(
        {
            "attempt": np.arange(3),
            "scale": np.array([4.0, 2.0, 2.0]),
            "scale_after": np.array([2.0, 2.0, 4.0]),
        }
    )
    assert ledger.take()[0]["skipped"].tolist() == [True, False, False]


def test_old_samples_are_thinned_and_the_newest_kept():
    samples = Samples()
    for attempt in range(5000):
        samples.add(table(attempt) | {"tensor": np.array([0]), "numel": np.array([1])})
    kept = [sample.attempt for sample in samples]
    assert kept[-NEWEST:] == list(range(5000 - NEWEST, 5000))
    assert (kept[0], len(kept) < 400) == (0, True)


@pytest.mark.parametrize(("tensors", "newest"), [(74, 32), (1000, 16), (5000, 2)])
def test_of_many_tensors_fewer_samples_are_kept_so_that_memory_has_a_bound(tensors, newest):
    samples, most_bytes = Samples(most_bytes=6 << 20), 0
    of_each = {"tensor": np.arange(tensors), "hist": np.ones((tensors, 64), np.int64)}
    for attempt in range(0, 10_000, 25):
        samples.add({"attempt": np.full(tensors, attempt)} | of_each)
        most_bytes = max(
            most_bytes, sum(part.nbytes for parts in samples._unfitted.values() for part in parts)
        )
    kept = list(samples)
    assert [sample.attempt for sample in kept][-newest:] == list(range(10_000 - 25 * newest, 10_000, 25))
    assert most_bytes <= 3 << 20
    assert sum(sample.tensors.nbytes for sample in kept) <= 6 << 20


def test_what_is_kept_within_a_bound_does_not_depend_on_the_order():
    def kept(attempts):
        samples = Samples(most_bytes=SAMPLE.itemsize * 200)
        for attempt in attempts:
            samples.add({"attempt": np.full(5, attempt), "tensor": np.arange(5)})
        return [sample.attempt for sample in samples]

    in_order = list(range(3000))
    assert kept(in_order) == kept(in_order[::-1]) == kept(random.Random(0).sample(in_order, 3000))


def test_what_was_fitted_before_is_not_fitted_again():
    rng = np.random.default_rng(0)
    hist, n_zero = rng.integers(0, 100, (6, 64)), rng.integers(0, 1000, 6)
    rows = {
        "attempt": np.repeat([3, 9], 3),
        "tensor": np.tile(np.arange(3), 2),
        "n_zero": n_zero,
        "hist": hist,
    }
    shape = shape_of(hist, n_zero.astype(float))

    def lost(table):
        samples = Samples()
        samples.add(table)
        return np.concatenate([sample.tensors for sample in samples])

    assert (shape >= 0).any()
    assert lost(rows | {"shape": shape}).tobytes() == lost(rows).tobytes()
    assert not lost(rows | {"shape": np.full(6, -1)})["lost"].any()


def test_a_sample_that_is_kept_does_not_hold_the_flush_it_came_with():
    samples, rows, sizes = Samples(), 500, []
    tracemalloc.start()
    try:
        for first in range(0, 30 * rows, rows):
            of_each = {"tensor": np.zeros(rows, np.int64), "hist": np.zeros((rows, 64), np.int64)}
            samples.add({"attempt": np.arange(first, first + rows)} | of_each)
            held = len(list(samples))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held < 400
    assert sizes[-1] - sizes[9] < 2**18
