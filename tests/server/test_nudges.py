"""Servers that let each other know, where a balancer hands the batches of one run to all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import sent

from ampwatch_server.limits import check
from ampwatch_server.nudges import Nudges
from ampwatch_server.service import Service
from ampwatch_server.settings import Settings

pytestmark = pytest.mark.parametrize(
    "database", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True
)


@pytest.fixture
def two(database: str) -> Iterator[tuple[Service, Service]]:
    """Two servers at work on one database; neither looks for news by itself."""
    both = (
        Service(Settings(database), sent.NoDiagnosis),
        Service(Settings(database), sent.NoDiagnosis),
    )
    for service in both:
        service.compactor._swept = time.monotonic() + 1e5
        service.start()
    yield both
    for service in both:
        service.stop()


def store(service: Service, first: int, end: int, seq: int) -> None:
    batch = sent.attempts(first, end, seq)
    service.inbox.append(batch, check(batch)).result()


def test_what_another_server_was_sent_is_worked_on_by_the_one_that_has_the_run(
    two: tuple[Service, Service],
) -> None:
    one, other = two
    store(one, 0, 5, 0)
    sent.until(lambda: sent.attempts_of(one, "r") == 5, 60)
    end = 5

    def is_seen() -> bool:
        nonlocal end
        store(other, end, end + 1, end)  # again and again: `one` may not listen yet
        end += 1
        return (sent.attempts_of(one, "r") or 0) > 5

    assert sent.until(is_seen, 60)


def test_a_run_that_is_not_worked_on_here_is_left_to_others(service: Service) -> None:
    sent.store(service, sent.attempts(0, 3), fold=False)
    service.compactor.look_at("r")
    look = service.compactor._agenda.take()
    assert look is not None
    assert not look.at_all


def test_servers_of_a_database_hear_of_each_other(service: Service) -> None:
    heard: list[str] = []
    nudges = Nudges(service.database, heard.append)
    nudges.start()
    assert sent.until(lambda: nudges.tell("r") or "r" in heard, 60)
    nudges.stop()
