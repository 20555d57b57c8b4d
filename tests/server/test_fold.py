from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sent
import sqlalchemy as sa
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Connection

from ampwatch.records import Batch, Event
from ampwatch_server import tables as t
from ampwatch_server.fold import fold
from ampwatch_server.lease import Lease, LeaseLost
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings
from ampwatch_server.store.place import write_chunks
from ampwatch_server.store.rows import by_window
from ampwatch_server.store.series import Range, read_series
from ampwatch_server.store.tail import Key
from ampwatch_server.store.tensors import read_heatmap

WINDOW = 1024
ORDERS = int(os.environ.get("AMPWATCH_ORDERS", "2"))  # `make soak` tries 20


def series(service: Service, first: int = 0, last: int | None = None, points: int = 600) -> dict[str, object]:
    with service.database.read() as connection:
        asked = Range(first, last, points)
        return read_series(connection, service.tails, "r", ["loss"], asked)


def places(service: Service) -> list[tuple[int, int, int]]:
    return sorted(place[2:] for place in sent.all_chunks(service))


def inbox_size(service: Service) -> int:
    with service.database.read() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(t.inbox)).scalar_one()


def fold_given(service: Service, given: set[Key]) -> None:
    """As the compactor does, of a producer of which so much was looked at."""
    lease = Lease("r", "here", service.settings)
    service.database.write(lease.acquire)
    query = sa.select(t.producers, sa.false().label("whole"))
    with service.database.read() as connection:
        rows = connection.execute(query).all()
    fold(service.database, service.tails, lease, rows, dict.fromkeys(given), {})


def test_a_window_is_folded_once_its_producer_has_gone_past_it(service: Service) -> None:
    sent.store(service, sent.attempts(0, 1000, 0))
    assert (places(service), inbox_size(service)) == ([], 1)
    sent.store(service, sent.attempts(1000, 1030, 1))
    assert (places(service), inbox_size(service)) == ([(0, 0, 0)], 1)
    assert sent.all_chunks(service)[sent.P, "attempts", 0, 0, 0]["attempt"] == list(range(1024))


def test_the_end_of_a_producer_folds_its_last_window(service: Service) -> None:
    sent.store(service, sent.attempts(0, 10, 0), sent.events(Event("finish", 1.0), seq=1))
    assert (places(service), inbox_size(service)) == ([(0, 0, 0)], 0)


def test_what_is_folded_in_several_goes_is_folded_as_in_one(service: Service) -> None:
    small = [
        sent.attempts(i * 10, i * 10 + 10, i) for i in range(300)
    ]  # 256 at once: in the midst of a window
    large = sent.attempts(0, 3000, 0, producer=sent.Q)
    ends = [sent.events(Event("finish", 1.0), seq=999, producer=each) for each in (sent.P, sent.Q)]
    sent.store(service, *small, large, *ends)
    chunks = sent.all_chunks(service)
    for first, end in ((0, 1024), (1024, 2048), (2048, 3000)):
        ours, theirs = (chunks[each, "attempts", 0, 0, first] for each in (sent.P, sent.Q))
        assert ours["attempt"] == theirs["attempt"] == list(range(first, end))
        assert ours["loss"] == theirs["loss"]
    assert inbox_size(service) == 0


def test_a_window_has_the_columns_of_its_own_batches_only(service: Service) -> None:
    """Though batches of one producer are split into windows together."""
    rates = {"log.rate": np.full(WINDOW, 0.5)}
    batches = [
        sent.attempts(i * WINDOW, (i + 1) * WINDOW, i, **given) for i, given in enumerate(({}, rates, {}))
    ]
    sent.store(service, *batches, sent.attempts(3 * WINDOW, 3 * WINDOW + 10, 3))
    chunks = sent.all_chunks(service)
    of = [chunks[sent.P, "attempts", 0, 0, i * WINDOW] for i in range(3)]
    assert ["log.rate" in rows for rows in of] == [False, True, False]


def test_rows_in_no_order_are_split_as_rows_in_order() -> None:
    attempt = np.random.default_rng(0).permutation(4 * WINDOW)
    parts = [(first, part["attempt"].tolist()) for first, part in by_window({"attempt": attempt})]
    assert parts == [(i * WINDOW, attempt[attempt // WINDOW == i].tolist()) for i in range(4)]


def test_silence_folds_the_last_window(service: Service, clock: list[float]) -> None:
    sent.store(service, sent.attempts(0, 10, 0))
    clock[0] += 61
    service.compactor.process("r")
    assert (places(service), inbox_size(service)) == ([(0, 0, 0)], 0)


def ranks(count: int) -> list[Batch]:
    return [sent.attempts(0, 50, producer=f"{rank:032x}", rank=rank) for rank in range(count)]


def test_ranks_that_fall_silent_together_share_a_transaction(
    service: Service, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampwatch_server.fold.LOCKED_S", 1e9)
    sent.store(service, *ranks(40))
    clock[0] += 61
    before = service.database.writer.commits
    service.compactor.process("r")
    assert service.database.writer.commits - before < 10
    folded = sent.all_chunks(service)
    assert [folded[f"{rank:032x}", "attempts", 0, 0, 0]["attempt"] for rank in range(40)] == [
        list(range(50))
    ] * 40
    assert inbox_size(service) == 0


def test_however_transactions_are_bounded_the_chunks_are_the_same(
    service: Service, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for run, bounds in (("one", (1e9, 1 << 30)), ("time", (0.0, 1 << 30)), ("bytes", (1e9, 1))):
        monkeypatch.setattr("ampwatch_server.fold.LOCKED_S", bounds[0])
        monkeypatch.setattr("ampwatch_server.fold.FOLDED_BYTES", bounds[1])
        mine = [
            sent.attempts(first, first + 700, seq, run=run, producer=f"{run:0<31}{rank}", rank=rank)
            for rank in range(3)
            for seq, first in enumerate((700, 0))
        ]
        sent.store(service, *mine)
        clock[0] += 61
        before = service.database.writer.commits
        service.compactor.process(run)
        commits = service.database.writer.commits - before
        chunks = {
            k[0][-1:] + str(k[1:]): v for k, v in sent.all_chunks(service).items() if k[0].startswith(run)
        }
        found.append((commits, chunks))
    (once, chunks), (by_time, same), (by_bytes, also) = found
    assert len(chunks) == 6
    assert chunks == same == also
    assert once < by_time <= by_bytes


def test_a_transaction_that_fails_leaves_all_its_producers_to_the_next(
    service: Service, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent.store(service, *ranks(4))
    clock[0] += 61
    written = []

    def write(connection: Connection, *given: Any) -> None:
        written.append(given)
        if len(written) == 3:
            raise LeaseLost("killed")
        write_chunks(connection, *given)

    monkeypatch.setattr("ampwatch_server.fold.LOCKED_S", 1e9)
    monkeypatch.setattr("ampwatch_server.fold.write_chunks", write)
    with pytest.raises(LeaseLost):
        service.compactor.process("r")
    assert (places(service), inbox_size(service)) == ([], 4)
    service.compactor.process("r")
    assert [chunk["attempt"] for chunk in sent.all_chunks(service).values()] == [list(range(50))] * 4
    assert inbox_size(service) == 0


def test_sixteen_windows_make_one_of_the_level_above(service: Service) -> None:
    loss = np.zeros(17 * WINDOW)
    loss[[5000, 5001, 9000]] = math.inf, math.nan, 1e6
    sent.store(service, sent.attempts(0, 17 * WINDOW, 0, loss=loss))
    assert [place for place in places(service) if place[1]] == [(0, 1, 0)]
    chunk = sent.all_chunks(service)[sent.P, "attempts", 0, 1, 0]
    assert len(chunk["attempt"]) == 1024
    at = 5000 // 16
    assert [chunk[f"loss:{part}"][at] for part in ("count", "pinf", "nan", "max")] == [14, 1, 1, 0.0]
    assert chunk["loss:max"][9000 // 16] == 1e6


def test_a_spike_shows_in_every_plot(service: Service) -> None:
    loss = np.ones(20 * WINDOW)
    loss[12_345] = 7e4
    sent.store(service, sent.attempts(0, 20 * WINDOW, 0, loss=loss))
    for points in (1, 7, 100, 600, 5000):
        assert max(series(service, points=points)["streams"][0]["series"]["loss"]["max"]) == 7e4


def test_reads_are_the_same_before_and_after_folding(service: Service) -> None:
    sent.store(service, *(sent.attempts(i * 700, (i + 1) * 700, i) for i in range(30)), fold=False)
    asked = [(0, None, 600), (0, None, 50), (999, 5000, 600), (3000, 20_000, 11), (20_990, None, 600)]
    before = [series(service, *a) for a in asked]
    service.compactor.process("r")
    after = [series(service, *a) for a in asked]
    assert len(sent.all_chunks(service)) == 21
    assert after == before


def test_a_late_batch_is_seen_at_once_and_merged_into_its_chunks(service: Service) -> None:
    sent.store(service, sent.attempts(0, 5000, 0), sent.attempts(5010, 20_000, 2))
    loss = np.full(10, 1e6)
    sent.store(service, sent.attempts(5000, 5010, 1, loss=loss), fold=False)
    waiting = series(service, points=20)
    assert max(waiting["streams"][0]["series"]["loss"]["max"]) == 1e6
    service.compactor.process("r")
    assert series(service, points=20) == waiting
    assert sent.all_chunks(service)[sent.P, "attempts", 0, 1, 0]["loss:max"][5000 // 16] == 1e6


def test_streams_have_chunks_of_their_own(service: Service) -> None:
    sent.store(
        service,
        sent.attempts(0, 3000, 0, every=2),
        sent.attempts(1, 3000, 1, every=2, stream=1),
    )
    assert places(service) == [(0, 0, 0), (0, 0, 1024), (1, 0, 0), (1, 0, 1024)]
    found = series(service, last=5)["streams"]
    assert [(s["stream"], s["attempt"]) for s in found] == [(0, [0, 2, 4]), (1, [1, 3, 5])]


def test_work_under_a_lost_lease_is_rolled_back(service: Service) -> None:
    sent.store(service, sent.attempts(0, 10, 0))
    thief = Lease("r", "thief", service.settings)
    assert not service.database.write(thief.acquire)
    mine = Lease("r", "nobody", service.settings)
    with pytest.raises(LeaseLost, match="run r: another server has taken it over, or it was deleted"):
        service.database.write(mine.assert_held)


def test_a_lease_that_ran_out_goes_to_the_next(service: Service, clock: list[float]) -> None:
    sent.store(service, sent.attempts(0, 10, 0))
    clock[0] += service.settings.lease_s + 1
    assert service.database.write(Lease("r", "next", service.settings).acquire)


def scrambled(seed: int, name: str) -> list[sent.Batch]:
    """18,000 attempts of two streams, and three tensors of them, in uneven batches; rows that overlap disagree."""
    rng = random.Random(seed)
    header = {"producer": name * 32, "run": name}
    batches, first = [], 0
    while first < 18_000:
        end = first + rng.choice((1, 30, 900, 2500))
        loss = np.arange(first, end) % 7 + len(batches) / 1000
        batches.append(sent.attempts(first, end, len(batches), stream=len(batches) % 2, loss=loss, **header))
        recorded = [attempt for attempt in range(first, end, 25) for _ in range(3)]
        sizes = np.arange(len(recorded)) + len(batches)
        of = [0, 1, 2] * (len(recorded) // 3)
        batches.append(sent.tensors(recorded, of, len(batches), max_abs=sizes, **header))
        first = max(first + 1, end - rng.choice((0, 0, 5, 400)))
    return [*batches, sent.events(Event("finish", 1.0), seq=len(batches), **header)]


def stored(service: Service, name: str) -> list[dict[tuple[object, ...], dict[str, list[object]]]]:
    """Chunks and parts of a run that `scrambled` sent, decoded, by their places."""
    tables = (sent.all_chunks(service), sent.all_chunks(service, t.parts))
    return [{key[1:]: rows for key, rows in table.items() if key[0] == name * 32} for table in tables]


@pytest.fixture
def plain(database: str) -> Iterator[Service]:
    service = Service(Settings(database=database, clock=lambda: 1e6), sent.NoDiagnosis)
    yield service
    service.database.close()


@settings(
    max_examples=ORDERS,
    phases=[Phase.generate],  # to shrink takes minutes and shows nothing more
)
@given(st.integers(0, 999), st.randoms(use_true_random=False))
def test_any_order_and_repetition_end_in_the_same_chunks(
    plain: Service, seed: int, order: random.Random
) -> None:
    for name in "ab":
        plain.database.write(lambda c, name=name: c.execute(t.runs.delete().where(t.runs.c.run == name)))
    sent.store(plain, *scrambled(seed, "a"))
    again = scrambled(seed, "b")
    again += order.choices(again, k=5)
    order.shuffle(again)
    while again:  # in parts, with a pass of the compactor after each
        size = order.randint(1, 12)
        sent.store(plain, *again[:size])
        again = again[size:]
    assert stored(plain, "b") == stored(plain, "a")
    assert answers(plain, "b") == answers(plain, "a")


def answers(service: Service, run: str) -> list[object]:
    with service.database.read() as connection:
        asked = Range(0, None, 37)
        lines = read_series(connection, service.tails, run, ["loss"], asked)
        grid = read_heatmap(connection, service.tails, run, "headroom_log2", asked, rows=None)
    streams = [stream | {"producer": ""} for stream in lines["streams"]]
    return [streams, grid["attempt"], grid["values"]]


def test_through_a_backlog_no_window_is_rolled_up_before_all_of_it_is_folded(service: Service) -> None:
    batches = [sent.attempts(i * WINDOW, (i + 1) * WINDOW, i) for i in range(18)]
    sent.store(service, *batches, fold=False)
    keys = [(1, i) for i in range(18)]
    found = []
    for most in (10, 17):
        fold_given(service, set(keys[:most]))
        found.append([place for place in places(service) if place[1]])
    assert found == [[], [(0, 1, 0)]]


def test_the_points_of_an_open_parent_are_there_as_parts(service: Service) -> None:
    sent.store(service, sent.attempts(0, 3 * WINDOW, 0))
    assert sorted(key[2:] for key in sent.all_chunks(service, t.parts)) == [
        (0, 1, 0), (0, 1, WINDOW), (0, 1, 2 * WINDOW),
    ]  # fmt: skip
    sent.store(service, sent.attempts(3 * WINDOW, 16 * WINDOW, 1))
    assert sorted(key[2:] for key in sent.all_chunks(service, t.parts)) == [(0, 2, 0)]


def test_chunks_from_before_there_were_parts_are_read_and_rolled_up(service: Service) -> None:
    sent.store(service, sent.attempts(0, 15 * WINDOW, 0))
    before = series(service, points=20)
    service.database.write(lambda c: c.execute(t.parts.delete()))
    assert series(service, points=20) == before
    sent.store(service, sent.attempts(15 * WINDOW, 16 * WINDOW, 1))
    assert (0, 1, 0) in places(service)
    assert series(service, last=15 * WINDOW - 1, points=20) == before
