from __future__ import annotations

import sent

from ampwatch_server.agenda import New
from ampwatch_server.compactor import Compactor
from ampwatch_server.inbox import Inbox
from ampwatch_server.limits import check
from ampwatch_server.service import Service


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
