"""Leases over passes that take long, and over the pauses between the batches of a calm run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import sent
import sqlalchemy as sa

from ampwatch.diagnosis.findings import Finding
from ampwatch_server import tables as t
from ampwatch_server.lease import Lease, Leases
from ampwatch_server.limits import check
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings


@pytest.fixture
def leases(service: Service) -> Leases:
    """Those of a server that is asked to renew them by the tests."""
    sent.store(service, sent.attempts(0, 3), fold=False)
    return Leases(service.database, service.settings, "me")


def can_be_taken(service: Service) -> bool:
    return service.database.write(Lease("r", "another", service.settings).acquire)


def test_a_lease_lasts_as_long_as_a_pass_and_the_pause_after_it(
    service: Service, leases: Leases, clock: list[float]
) -> None:
    lease = Lease("r", "me", service.settings)
    assert service.database.write(lease.acquire)
    with leases.held(lease):
        for _ in range(3):
            clock[0] += 10
            leases.renew()
    clock[0] += 10
    leases.renew()
    clock[0] += 10
    assert not can_be_taken(service)
    clock[0] += 10  # the server is gone
    assert can_be_taken(service)


def test_a_run_whose_pass_failed_is_left_to_whoever_is_quicker(
    service: Service, leases: Leases, clock: list[float]
) -> None:
    lease = Lease("r", "me", service.settings)
    assert service.database.write(lease.acquire)
    with pytest.raises(RuntimeError), leases.held(lease):
        raise RuntimeError
    clock[0] += 16
    leases.renew()
    assert can_be_taken(service)


class Slow(sent.NoDiagnosis):
    """A diagnosis that takes until it is let go."""

    go_on = threading.Event()

    def findings(self) -> list[Finding]:
        assert self.go_on.wait(60)
        return []


@pytest.fixture
def slow(database: str) -> Iterator[Service]:
    """A server at work on a run, whose pass goes on until `Slow.go_on`."""
    Slow.go_on.clear()
    service = Service(Settings(database=database, lease_s=0.5), Slow)
    service.start()
    batch = sent.attempts(0, 3)
    service.inbox.append(batch, check(batch)).result()
    yield service
    Slow.go_on.set()
    service.stop()


def test_a_server_renews_its_lease_while_a_pass_goes_on(slow: Service) -> None:
    def lease_until() -> float:
        with slow.database.read() as connection:
            return float(connection.execute(sa.select(t.run_state.c.lease_until)).scalar_one())

    first = sent.until(lease_until)
    assert sent.until(lambda: lease_until() > first, 60)
    assert not Slow.go_on.is_set()
