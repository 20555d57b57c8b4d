from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sent
import sqlalchemy as sa

from ampwatch_server import tables as t
from ampwatch_server.service import Service
from ampwatch_server.store.tail import TailReader
from ampwatch_server.summary import count_attempts


def counts(service: Service, row: Any) -> dict[str, int]:
    return {"attempts": row.attempts, "skipped": row.skipped}


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 5), (5, 10), (10, 1030), (1030, 1040)],  # in order, and through a window that is folded
        [(0, 5), (10, 15), (5, 10), (15, 20)],  # one late
        [(5, 10), (0, 5), (10, 15)],
        [(0, 5), (3, 8), (8, 12)],  # recorded twice
        [(0, 1030), (1030, 1040), (1000, 1010), (1040, 1050)],
    ],
)
def test_attempts_are_counted_once_in_any_order(service: Service, spans: list[tuple[int, int]]) -> None:
    for seq, (first, end) in enumerate(spans):
        sent.store(service, sent.attempts(first, end, seq, found_inf=np.arange(first, end) % 3 == 0))
    covered = {attempt for span in spans for attempt in range(*span)}
    with service.database.read() as connection:
        row = connection.execute(sa.select(t.producers)).one()
        assert counts(service, row) == count_attempts(connection, service.tails, row.id)
    assert counts(service, row) == {"attempts": len(covered), "skipped": sum(a % 3 == 0 for a in covered)}


def test_a_server_that_takes_a_run_over_goes_on_counting(service: Service) -> None:
    sent.store(service, sent.attempts(0, 1030, 0))
    other = Service(service.settings, sent.NoDiagnosis)
    service.database.write(lambda c: c.execute(t.run_state.update().values(holder="", lease_until=0.0)))
    sent.store(other, sent.attempts(1030, 1040, 1), sent.attempts(1040, 1050, 2))
    assert sent.attempts_of(other, "r") == 1050
    other.database.close()


def test_a_batch_that_comes_while_all_is_counted_anew_is_counted_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent.store(service, sent.attempts(0, 5, 0))
    other = Service(service.settings, sent.NoDiagnosis)
    service.database.write(lambda c: c.execute(t.run_state.update().values(holder="", lease_until=0.0)))
    counted: list[int] = []

    def count(connection: sa.Connection, tails: TailReader, producer_id: int) -> dict[str, int]:
        counted.append(producer_id)
        return count_attempts(connection, tails, producer_id)

    def fold(*given: Any) -> Any:
        ends = original(*given)
        if not counted:
            sent.store(
                other, sent.attempts(10, 15, 2), fold=False
            )  # after the pass has looked, before it counts
        return ends

    original = other.compactor._fold_producers
    monkeypatch.setattr("ampwatch_server.counts.count_attempts", count)
    monkeypatch.setattr(other.compactor, "_fold_producers", fold)
    sent.store(other, sent.attempts(5, 10, 1))
    other.compactor.process("r")
    assert (sent.attempts_of(other, "r"), len(counted)) == (15, 1)
    other.database.close()


def statements(service: Service, ranks: int) -> int:
    """Executed in a pass after one of so many ranks sent something more."""
    run, names = f"{ranks} ranks", [f"{ranks}{i:031x}" for i in range(ranks)]
    sent.store(service, *(sent.attempts(0, 5, 0, producer=n, rank=i, run=run) for i, n in enumerate(names)))
    more = sent.attempts(5, 10, 1, producer=names[-1], rank=ranks - 1, run=run)
    sent.store(service, more, fold=False)
    seen: list[str] = []
    sa.event.listen(sa.Engine, "before_cursor_execute", note := lambda *given: seen.append(given[2]))
    service.compactor.process(run)
    sa.event.remove(sa.Engine, "before_cursor_execute", note)
    return len(seen)


def test_ranks_that_sent_nothing_new_are_not_visited(service: Service) -> None:
    assert statements(service, 2) == statements(service, 9)
