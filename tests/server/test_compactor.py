from __future__ import annotations

import pytest
import sent

from ampwatch_server.inbox import Inbox
from ampwatch_server.limits import check
from ampwatch_server.service import Service


def append_unannounced(service: Service, batch: sent.Batch) -> None:
    """As a server does that dies right after the commit."""
    Inbox(service.database, service.settings, lambda _: None).append(batch, check(batch)).result()


def test_runs_that_nobody_announced_are_found_while_others_are_busy(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampwatch_server.compactor.SWEEP_S", 0.5)
    monkeypatch.setattr("ampwatch_server.compactor.PAUSE_S", 0.01)
    append_unannounced(service, sent.attempts(0, 3))

    def counted() -> bool:
        service.compactor.announce({"busy": []})
        return sent.attempts_of(service, "r") == 3

    service.compactor.start()
    sent.until(counted)
    service.compactor.stop()
