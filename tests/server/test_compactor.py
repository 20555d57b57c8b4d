from __future__ import annotations

import sent

from ampwatch_server.agenda import New
from ampwatch_server.compactor import Compactor
from ampwatch_server.inbox import Inbox
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.summary import summarise


def append_unannounced(service: Service, batch: sent.Batch) -> None:
    """As a server does that dies right after the commit."""
    Inbox(service.database, service.settings, lambda _: None).append(batch, check(batch)).result()


def test_runs_that_nobody_announced_are_found_while_others_are_busy(service: Service) -> None:
    compactor = Compactor(
        service.database,
        service.settings,
        service.tails,
        sent.NoDiagnosis,
        changed=lambda _: None,
        found=lambda *_: None,
        metrics=service.metrics,
        sweep_s=0.2,
    )
    append_unannounced(service, sent.attempts(0, 3))

    def counted() -> bool:
        compactor.announce({"busy": [New((9, 0), 1)]})
        return sent.attempts_of(service, "r") == 3

    compactor.start()
    sent.until(counted)
    compactor.stop()


def test_a_summary_is_made_of_what_was_looked_at_only(service: Service) -> None:
    sent.store(service, sent.attempts(0, 3, 0), sent.attempts(3, 5, 1))
    with service.database.read() as connection:
        some = summarise(connection, service.tails, "r", {(1, 0)})
        none = summarise(connection, service.tails, "r", ())
    assert (some["attempts"], some["step"], some["sparkline"]["loss"]) == (5, 3, [0.0, 1.0, 2.0])
    assert none == {"attempts": 5, "taken": 5, "skipped": 0, "sparkline": {"loss": [], "scale_log2": []}}
