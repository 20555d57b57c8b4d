from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sent
import sqlalchemy as sa

from ampwatch.records import Event
from ampwatch_server import tables as t
from ampwatch_server.limits import check
from ampwatch_server.retention import Drop, Retention, told
from ampwatch_server.service import Service
from ampwatch_server.settings import Keep, Settings
from ampwatch_server.store.removal import delete_where, empty_run
from ampwatch_server.store.runs import delete_run
from ampwatch_server.store.series import Range, read_series
from ampwatch_server.store.tensors import read_heatmap

DAY_S = 86400.0


def recorded(service: Service, run: str = "r", producer: str = sent.P) -> None:
    header = {"run": run, "producer": producer}
    attempt = list(range(0, 5000, 25))
    sent.store(
        service,
        sent.attempts(0, 5000, 0, **header),
        sent.tensors(attempt, [0] * len(attempt), 1, **header),
        sent.events(*sent.named("w"), Event("finish", 1.0, data={"attempts": 5000}), seq=2, **header),
    )


def retention(service: Service, **keep: object) -> Retention:
    return Retention(service.database, replace(service.settings, keep=replace(Keep(), **keep)))


def levels(service: Service) -> set[tuple[str, int]]:
    return {(place[1], place[3]) for place in sent.all_chunks(service)}


def losses(service: Service) -> list[float]:
    with service.database.read() as connection:
        found = read_series(connection, service.tails, "r", ["loss"], Range(0, 4095, 8))["streams"][0]
    return found["series"]["loss"]["max"]


def grid(service: Service) -> list[list[float]]:
    with service.database.read() as connection:
        asked = Range(0, 4095, 16)
        return read_heatmap(connection, service.tails, "r", "norm", asked, rows=None)["values"]


def test_detail_goes_by_age_and_the_levels_above_stay(service: Service, clock: list[float]) -> None:
    recorded(service)
    before = losses(service), grid(service)
    assert retention(service).prune() == []
    clock[0] += 8 * DAY_S
    assert retention(service).due() == [Drop("r", "tensors", "age")]
    assert retention(service).prune() == [Drop("r", "tensors", "age")]
    clock[0] += 90 * DAY_S
    assert retention(service).prune() == [Drop("r", "attempts", "age")]
    assert [key[4] for key in sent.all_chunks(service)] == [4096, 4096]  # the last window of each kind
    assert (losses(service), grid(service)) == before
    assert retention(service).due() == []


def test_what_a_client_keeps_of_a_run_is_old_when_detail_has_gone(
    service: Service, clock: list[float]
) -> None:
    def revision() -> int:
        with service.database.read() as connection:
            return connection.execute(sa.select(t.run_state.c.revision)).scalar_one()

    recorded(service)
    before = revision()
    clock[0] += 8 * DAY_S
    retention(service).prune()
    assert revision() == before + 1


def test_a_run_that_lives_is_left_alone(service: Service, clock: list[float]) -> None:
    recorded(service)
    clock[0] += 100 * DAY_S
    sent.store(service, sent.attempts(5000, 5001, 3))
    assert retention(service, max_bytes=0).prune() == []


def test_what_was_recorded_long_before_it_came_is_as_old_as_its_coming(
    service: Service, clock: list[float]
) -> None:
    attempt = list(range(0, 5000, 25))
    for batch in (sent.attempts(0, 5000, 0), sent.tensors(attempt, [0] * len(attempt), 1)):
        service.inbox.append(batch, check(batch), time=clock[0] - 30 * DAY_S).result()
    service.compactor.process("r")
    clock[0] += 6 * DAY_S
    assert retention(service).due() == []
    clock[0] += 2 * DAY_S
    assert retention(service).due() == [Drop("r", "tensors", "age")]


def test_over_the_size_the_longest_silent_go_first_and_whole_runs_last(
    service: Service, clock: list[float]
) -> None:
    recorded(service)
    clock[0] += 7200
    recorded(service, "s", sent.Q)
    clock[0] += 7200
    wanted = [Drop(run, what, "size") for what in ("tensors", "attempts", "run") for run in "rs"]
    assert retention(service, max_bytes=0).prune() == wanted
    assert rows(service) == {"tokens": 0, "audit": 0}


def rows(service: Service) -> dict[str, int]:
    """Rows of every table that has any and is not about the database itself, and of those that belong to no run."""
    with service.database.read() as connection:
        counts = {
            table.name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in t.metadata.sorted_tables
        }
    del counts["formats"]
    return {name: n for name, n in counts.items() if n or name in ("tokens", "audit")}


def test_nothing_is_left_of_a_run_that_was_deleted(service: Service) -> None:
    recorded(service)
    finding = {"run": "r", "key": "k", "place": 0, "kind": "k", "severity": "warning", "body": b""}
    service.database.write(lambda c: c.execute(t.findings.insert(), finding))
    assert {"runs", "run_state", "producers", "receipts", "chunks", "parts", "events", "tensors"} <= set(
        rows(service)
    )
    empty_run(service.database, "r")
    service.database.write(lambda c: delete_run(c, "r"))
    assert rows(service) == {"tokens": 0, "audit": 0}


def test_slices_delete_every_row(service: Service) -> None:
    entry = {"time": 0.0, "who": "", "action": "", "subject": ""}
    service.database.write(lambda c: c.execute(t.audit.insert(), [entry] * 5000))
    assert delete_where(service.database, t.audit, t.audit.c.time < 1.0) == 5000
    assert rows(service) == {"tokens": 0, "audit": 0}


def test_the_file_gets_smaller(tmp_path: Path, clock: list[float]) -> None:
    service = Service(Settings(str(tmp_path / "a.db"), clock=lambda: clock[0]), sent.NoDiagnosis)
    recorded(service)
    before = pragma(service, "page_count")
    clock[0] += 7200
    retention(service, max_bytes=0).prune()
    assert (pragma(service, "freelist_count"), pragma(service, "page_count") < before) == (0, True)
    service.database.close()


def pragma(service: Service, name: str) -> int:
    return service.database.write(lambda c: c.exec_driver_sql(f"PRAGMA {name}").scalar_one())


def test_a_row_whose_window_is_gone_is_not_taken_for_the_whole_of_it(
    service: Service, clock: list[float]
) -> None:
    recorded(service)
    clock[0] += 100 * DAY_S
    retention(service).prune()
    before = losses(service)
    sent.store(service, sent.attempts(10, 11, 3, loss=[1e9]))
    service.compactor.process("r")
    assert losses(service) == before


def test_chunks_without_parts_get_them_before_they_go(service: Service, clock: list[float]) -> None:
    recorded(service)
    before = losses(service), grid(service)
    service.database.write(lambda c: c.execute(t.parts.delete()))
    clock[0] += 100 * DAY_S
    retention(service).prune()
    assert (losses(service), grid(service)) == before


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (
            Keep(),
            "retention drops rows of tensors 7 days after their run was last heard of; "
            "rows of attempts 90 days after their run was last heard of; "
            "above 64 GiB the same sooner, and whole runs last",
        ),
        (Keep(None, None, None), "retention drops nothing"),
    ],
)
def test_it_says_what_it_will_drop(keep: Keep, said: str) -> None:
    assert told(keep) == said


def test_what_is_cut_off_shows_no_hole_and_is_finished_later(tmp_path: Path, clock: list[float]) -> None:
    service = Service(Settings(str(tmp_path / "a.db"), clock=lambda: clock[0]), sent.NoDiagnosis)
    recorded(service)
    before = losses(service)
    clock[0] += 100 * DAY_S
    refuse = "CREATE TRIGGER refuse BEFORE DELETE ON chunks BEGIN SELECT RAISE(ABORT, 'cut off'); END"
    service.database.write(lambda c: c.exec_driver_sql(refuse))
    with pytest.raises(sa.exc.DatabaseError, match="cut off"):
        retention(service, tensors_days=None).prune()
    service.database.write(lambda c: c.exec_driver_sql("DROP TRIGGER refuse"))
    clock[0] += 60
    sent.store(service, sent.attempts(10, 11, 3, loss=[1e9]))  # late, for rows that are on their way out
    clock[0] += 100 * DAY_S
    assert retention(service, tensors_days=None).prune() == [Drop("r", "attempts", "age")]
    assert {place[4] for place in sent.all_chunks(service) if place[1:4:2] == ("attempts", 0)} == {4096}
    assert losses(service) == before
    service.database.close()


def test_deleting_ends_with_the_slice_that_is_under_way(service: Service) -> None:
    entry = {"time": 0.0, "who": "", "action": "", "subject": ""}
    service.database.write(lambda c: c.execute(t.audit.insert(), [entry] * 50))
    gone = t.audit.c.time < 1.0
    assert delete_where(service.database, t.audit, gone, stopped=lambda: True) == 8
    assert delete_where(service.database, t.audit, gone) == 42
