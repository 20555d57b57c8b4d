"""What an attempt's row says of each optimizer."""

import numpy as np

from ampwatch.logbook import MAX_NAMES
from ampwatch.outcome import Attempt, Outcome, Unscaled, by_optimizer
from ampwatch.records import ATTEMPT_COLUMNS, is_added, pack_table
from ampwatch.stats.layout import SCALARS

MANY = range(1000)


def test_any_number_of_optimizers_and_groups_fits_into_a_batch_beside_what_is_logged():
    unscaled = [Unscaled(i, np.array([i]), fused=False) for i in MANY]
    rates: dict[int, list[float | None]] = {i: [0.1] * 1000 for i in MANY}
    attempt = Attempt(0, 0, 0, 1.0, [], 1, True, [*MANY], [*MANY], unscaled, False, lrs=rates)
    statistics = np.zeros((len(SCALARS), 1000))
    outcome = Outcome(1.0, 1.0, 0, 1.0, [], False, {}, dict.fromkeys(MANY, 1.0), np.array(MANY), statistics)
    columns = by_optimizer(attempt, outcome)
    assert (columns["optimizer.0.lr.31"], "optimizer.0.lr.32" in columns) == (0.1, False)
    assert all(map(is_added, columns))
    row = {name: [0] for name in (*ATTEMPT_COLUMNS, *columns, *(f"log.{i}" for i in range(MAX_NAMES)))}
    table = {name: np.array(column, ATTEMPT_COLUMNS.get(name, np.float64)) for name, column in row.items()}
    batch = pack_table("attempts", table, producer="0" * 32, seq=0, run="r", rank=0)
    assert set(batch.table()) == set(table)
