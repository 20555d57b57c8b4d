from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest
import sent
import sqlalchemy as sa

from ampwatch_server import tables as t
from ampwatch_server.agenda import New
from ampwatch_server.inbox import Conflict, Inbox, OtherProject, Overloaded, Stored, _new_run
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings
from ampwatch_server.store.removal import empty_run
from ampwatch_server.store.runs import get_run


def append(service: Service, batch: sent.Batch) -> Stored:
    return service.inbox.append(batch, check(batch)).result()


def is_new(service: Service, batch: sent.Batch) -> bool:
    return append(service, batch).new


def producer(service: Service) -> dict[str, object]:
    with service.database.read() as connection:
        return get_run(connection, service.settings, "r")["producers"][0]


def test_a_batch_is_stored_once(service: Service) -> None:
    batch = sent.attempts(0, 5, seq=0)
    assert is_new(service, batch)
    assert not is_new(service, batch)
    service.compactor.process("r")
    assert not is_new(service, batch)  # also once it is folded
    with service.database.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(t.receipts)).scalar() == 1


def test_a_batch_that_was_overtaken_is_stored_once(service: Service) -> None:
    late, ahead = sent.attempts(0, 5, seq=3), sent.attempts(5, 9, seq=5)
    assert [append(service, batch).new for batch in (ahead, late, late, ahead)] == [True, True, False, False]


def test_what_comes_while_its_run_is_deleted_is_known_when_it_comes_again(service: Service) -> None:
    append(service, sent.attempts(0, 1, 0))
    came: list[sent.Batch] = []

    def is_stopped() -> bool:
        """Asked before each table is emptied."""
        came.append(sent.attempts(len(came) + 1, len(came) + 2, len(came) + 1))
        assert is_new(service, came[-1])
        return False

    empty_run(service.database, "r", is_stopped)
    with service.database.read() as connection:
        waiting = connection.scalars(sa.select(t.inbox.c.seq).order_by(t.inbox.c.seq)).all()
    assert [batch.seq for batch in came if not is_new(service, batch)] == waiting


def test_a_batch_sent_twice_in_one_commit_is_stored_once(service: Service) -> None:
    gate = threading.Event()
    service.database.submit(lambda _: gate.wait())
    batch = sent.attempts(0, 5)
    futures = [service.inbox.append(batch, check(batch)) for _ in range(3)]
    gate.set()
    assert [future.result().new for future in futures] == [True, False, False]


def test_batches_that_wait_for_the_writer_share_a_commit(service: Service) -> None:
    commits: list[dict[str, list[New]]] = []
    inbox = Inbox(service.database, service.settings, commits.append)
    gate = threading.Event()
    service.database.submit(lambda _: gate.wait())
    batches = [
        sent.attempts(0, 5, seq, run=run, producer=p) for seq, run, p in ((0, "r", sent.P), (0, "s", sent.Q))
    ]
    futures = [inbox.append(batch, check(batch)) for batch in batches]
    gate.set()
    assert [future.result().new for future in futures] == [True, True]
    service.database.write(lambda _: None)
    assert [[(run, batch.key[1]) for run, [batch] in new.items()] for new in commits] == [
        [("r", 0), ("s", 0)]
    ]


def cancelled_among_three(service: Service, inbox: Inbox) -> list[Future[Stored]]:
    """Three batches that share a commit; whoever sent the first left before it."""
    gate = threading.Event()
    service.database.submit(lambda _: gate.wait())
    batches = [sent.attempts(seq, seq + 1, seq) for seq in range(3)]
    futures = [inbox.append(batch, check(batch)) for batch in batches]
    assert futures[0].cancel()
    gate.set()
    return futures


def test_a_sender_that_left_keeps_nobody_waiting(service: Service) -> None:
    commits: list[dict[str, list[New]]] = []
    inbox = Inbox(service.database, service.settings, commits.append)
    futures = cancelled_among_three(service, inbox)
    assert [future.result(5).new for future in futures[1:]] == [True, True]
    service.database.write(lambda _: None)
    assert [[batch.key[1] for batch in new["r"]] for new in commits] == [[0, 1, 2]]
    assert not is_new(service, sent.attempts(0, 1, 0))  # its batch is stored all the same


def test_a_sender_that_left_hides_no_failure_from_the_others(service: Service) -> None:
    service.database.write(lambda c: t.receipts.drop(c))
    futures = cancelled_among_three(service, service.inbox)
    assert [isinstance(future.exception(5), Exception) for future in futures[1:]] == [True, True]


def test_the_same_key_with_another_digest_is_a_conflict(service: Service) -> None:
    append(service, sent.attempts(0, 5, seq=3))
    with pytest.raises(
        Conflict, match=r"has sent another batch with seq 3 \(digest [0-9a-f]{32}, this one has"
    ):
        append(service, sent.attempts(0, 6, seq=3))


def test_a_producer_belongs_to_one_run_and_rank(service: Service) -> None:
    append(service, sent.attempts(0, 5, seq=0))
    with pytest.raises(Conflict, match="is rank 0 of run r, not rank 0 of run other"):
        append(service, sent.attempts(5, 9, seq=1, run="other"))


def test_gaps_are_shown(service: Service) -> None:
    sent.store(service, *(sent.attempts(i, i + 1, seq=i) for i in (2, 3, 6)))
    found = producer(service)
    assert (found["last_seq"], found["missing"]) == (6, [0, 1, 4, 5])
    sent.store(service, *(sent.attempts(i, i + 1, seq=i) for i in (0, 1, 4, 5)))
    assert producer(service)["missing"] == []


def test_a_receipt_says_how_far_its_producer_had_come(service: Service) -> None:
    told = [append(service, sent.attempts(i, i + 1, seq=i)).last_seq for i in (0, 3, 1, 3, 4)]
    assert told == [-1, 0, 3, 3, 3]


def test_too_much_that_waits_is_sent_back(service: Service) -> None:
    inbox = Inbox(service.database, replace(service.settings, max_pending_bytes=100), lambda _: None)
    batch = sent.attempts(0, 5)
    with pytest.raises(Overloaded):
        inbox.append(batch, check(batch))


def test_a_table_without_rows_is_stored_and_folded(service: Service) -> None:
    sent.store(service, sent.attempts(0, 0))
    with service.database.read() as connection:
        assert connection.execute(sa.select(t.inbox)).all() == []
    assert producer(service)["attempts"] == 0


def test_of_a_run_that_is_sent_first_by_tokens_of_two_projects_the_first_decides(service: Service) -> None:
    batches = [sent.attempts(0, 5, 0), sent.attempts(0, 5, 0, producer=sent.Q, rank=1)]
    futures = []

    def both(_: sa.Connection) -> None:  # while it runs they wait, and share a commit
        for batch, project in zip(batches, ("vision", "language"), strict=True):
            futures.append(service.inbox.append(batch, check(batch), project=project))

    service.database.write(both)
    assert futures[0].result().new
    with pytest.raises(OtherProject, match="run r is not one of project 'language'"):
        futures[1].result()
    with service.database.read() as connection:
        assert connection.execute(sa.select(t.runs.c.project, t.runs.c.bound)).all() == [("vision", True)]
        assert connection.scalars(sa.select(t.producers.c.producer)).all() == [sent.P]


@pytest.mark.parametrize("database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
def test_a_run_that_another_server_is_making_for_another_project_is_not_sent_to(
    service: Service, database: str
) -> None:
    other = Service(Settings(database), sent.NoDiagnosis)
    made, go_on = threading.Event(), threading.Event()

    def make(connection: sa.Connection) -> None:
        connection.execute(t.runs.insert().values(_new_run("r", 1.0, "language")))
        made.set()
        assert go_on.wait(60)

    def is_waited_for() -> bool:
        with other.database.read() as connection:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"
            return bool(connection.exec_driver_sql(waiting).scalar())

    making = other.database.submit(make)
    assert made.wait(60)
    batch = sent.attempts(0, 5)
    sending = service.inbox.append(batch, check(batch), project="vision")
    sent.until(is_waited_for)
    go_on.set()
    making.result()
    with pytest.raises(OtherProject):
        sending.result()
    other.database.close()
