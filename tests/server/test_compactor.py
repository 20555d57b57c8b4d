from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sent
import sqlalchemy as sa

from ampwatch.diagnosis.engine import Diagnosis
from ampwatch.diagnosis.findings import Finding, Verdict
from ampwatch_server import tables as t
from ampwatch_server.agenda import MOST_BATCHES, New
from ampwatch_server.compactor import Compactor
from ampwatch_server.diagnoser import Engine
from ampwatch_server.inbox import Inbox
from ampwatch_server.limits import check
from ampwatch_server.outdated import is_outdated, mark_unjudged
from ampwatch_server.service import Service
from ampwatch_server.summary import summarise

SELDOM_S = 3600.0
LOOKS = 3  # of as many batches as one may hold


class Counting(Diagnosis):
    """Counts how often it is asked."""

    asked = 0

    def verdict(self) -> Verdict:
        Counting.asked += 1
        return super().verdict()


def compactor_of(service: Service, engine: Callable[[], Engine], **given: Any) -> Compactor:
    """One of another server on the same database."""
    of = (service.database, service.settings, service.tails, engine)
    ignored = {"changed": lambda _: None, "found": lambda *_: None}
    return Compactor(*of, **ignored | {"count": service.metrics.add} | given)


def append_backlog(service: Service) -> None:
    """More than one look holds, with trouble in the middle."""
    inbox = Inbox(service.database, service.settings, lambda _: None)
    for seq in range(LOOKS * MOST_BATCHES):
        is_bad = np.full(10, seq // MOST_BATCHES == 1)
        losses = np.where(is_bad, np.nan, 1.0)
        batch = sent.attempts(10 * seq, 10 * seq + 10, seq, loss=losses, found_inf=is_bad, skipped=is_bad)
        last = inbox.append(batch, check(batch))
    last.result()


def findings_of(service: Service) -> list[Any]:
    with service.database.read() as connection:
        return list(connection.execute(sa.select(t.findings)))


def fail_at_trouble(_: sa.Connection, __: str, findings: list[Finding]) -> None:
    """As alerts do whose database is gone."""
    if findings:
        raise ZeroDivisionError


def append_unannounced(service: Service, batch: sent.Batch) -> None:
    """As a server does that dies right after the commit."""
    Inbox(service.database, service.settings, lambda _: None).append(batch, check(batch)).result()


def test_runs_that_nobody_announced_are_found_while_others_are_busy(service: Service) -> None:
    compactor = compactor_of(service, sent.NoDiagnosis, sweep_s=0.2)
    append_unannounced(service, sent.attempts(0, 3))

    def counted() -> bool:
        compactor.announce({"busy": [New((9, 0), 1)]})
        return sent.attempts_of(service, "r") == 3

    compactor.start()
    sent.until(counted)
    compactor.stop()


def test_what_a_server_before_it_left_is_looked_at_at_once(service: Service) -> None:
    append_unannounced(service, sent.attempts(0, 10))
    compactor = compactor_of(service, Diagnosis, sweep_s=3600)
    compactor.start()
    sent.until(lambda: sent.attempts_of(service, "r") == 10, 60)
    compactor.stop()


def test_a_summary_is_made_of_what_was_looked_at_only(service: Service) -> None:
    sent.store(service, sent.attempts(0, 3, 0), sent.attempts(3, 5, 1))
    with service.database.read() as connection:
        some = summarise(connection, service.tails, "r", {(1, 0)})
        none = summarise(connection, service.tails, "r", ())
    assert (some["attempts"], some["step"], some["sparkline"]["loss"]) == (5, 3, [0.0, 1.0, 2.0])
    assert none == {"attempts": 5, "taken": 5, "skipped": 0, "sparkline": {"loss": [], "scale_log2": []}}


def test_a_backlog_is_judged_now_and_then_and_at_its_end(service: Service) -> None:
    append_backlog(service)
    Counting.asked = 0
    compactor_of(service, Counting, told_s=SELDOM_S).process("r")
    assert Counting.asked == 2  # as it is taken over, and when nothing more is to be read
    found, attempts = findings_of(service), sent.attempts_of(service, "r")
    assert (found[0].kind, attempts) == ("nonfinite_forward", LOOKS * MOST_BATCHES * 10)


def test_however_often_a_backlog_is_judged_the_findings_are_the_same(
    service: Service, clock: list[float]
) -> None:
    append_backlog(service)
    found = []
    for told_s in (SELDOM_S, 0.0):
        compactor_of(service, Diagnosis, told_s=told_s).process("r")
        found.append(findings_of(service))
        service.database.write(lambda c: c.execute(t.findings.delete()))
        service.database.write(lambda c: mark_unjudged(c, "r"))
        clock[0] += 1000.0  # the lease has run out
    assert found[0] == found[1] != []


def test_what_a_look_has_read_is_not_read_again_to_be_folded(service: Service) -> None:
    asked: list[str] = []
    sa.event.listen(service.database._reading, "before_cursor_execute", lambda *given: asked.append(given[2]))
    sent.store(service, sent.tensors([0, 1030], [0, 0], 0))  # of which the second row waits on
    assert [place[2:] for place in sent.all_chunks(service)] == [(0, 0, 0)]
    assert sum("inbox.digest, inbox.body" in statement for statement in asked) == 1
    sent.store(service, sent.tensors([2050], [0], 1))
    assert [place[2:] for place in sent.all_chunks(service)] == [(0, 0, 0), (0, 0, 1024)]


def test_what_was_read_but_not_judged_is_judged_by_who_takes_over(
    service: Service, clock: list[float]
) -> None:
    append_backlog(service)
    cut_off = compactor_of(service, Diagnosis, told_s=SELDOM_S, found=fail_at_trouble)
    with pytest.raises(ZeroDivisionError):
        cut_off.process("r")
    with service.database.read() as connection:
        assert is_outdated(connection, "r")
    clock[0] += 1000.0
    service.compactor.process("r")
    assert [row.kind for row in findings_of(service)] == ["nonfinite_forward"]
