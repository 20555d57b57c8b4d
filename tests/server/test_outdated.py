"""After an upgrade of the engine, finished runs are judged anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import sent
import sqlalchemy as sa

from ampwatch.diagnosis.engine import ENGINE_VERSION
from ampwatch.records import Event
from ampwatch_server import tables as t
from ampwatch_server.outdated import EVERY_S, Outdated
from ampwatch_server.service import Service
from ampwatch_server.store.runs import touch

NAN = np.full(5, np.nan)


def finished_run(service: Service) -> None:
    """A run whose losses are NaN."""
    batch = sent.attempts(0, 5, 0, loss=NAN, found_inf=np.ones(5), skipped=np.ones(5))
    sent.store(service, batch, sent.events(Event("finish", 1.0, data={"attempts": 5}), seq=1))


def forget_findings(service: Service, **state: Any) -> None:
    """As an engine would that finds nothing; an older server writes no version."""

    def job(connection: sa.Connection) -> None:
        connection.execute(t.findings.delete())
        revision = t.run_state.c.revision + 1
        connection.execute(t.run_state.update().values({"revision": revision, **state}))

    service.database.write(job)


def kinds(service: Service) -> list[str]:
    with service.database.read() as connection:
        return list(connection.scalars(sa.select(t.findings.c.kind)))


def next_of(service: Service, outdated: Outdated) -> list[str]:
    with service.database.read() as connection:
        return outdated.next(connection)


def test_a_run_that_an_older_engine_judged_is_judged_anew_once(service: Service) -> None:
    finished_run(service)
    assert (kinds(service), next_of(service, Outdated())) == (["nonfinite_forward"], [])
    forget_findings(service, engine=ENGINE_VERSION - 1, judged=t.run_state.c.revision + 1)
    assert next_of(service, Outdated()) == ["r"]
    service.compactor.process("r")
    assert (kinds(service), next_of(service, Outdated())) == (["nonfinite_forward"], [])


def test_what_a_server_without_versions_wrote_over_it_is_judged_anew(service: Service) -> None:
    finished_run(service)
    forget_findings(service)
    assert next_of(service, Outdated()) == ["r"]
    service.compactor.process("r")
    assert (kinds(service), next_of(service, Outdated())) == (["nonfinite_forward"], [])


def test_what_a_newer_engine_found_is_left_alone(service: Service) -> None:
    finished_run(service)
    forget_findings(service, engine=ENGINE_VERSION + 1)
    service.compactor.process("r")
    assert (kinds(service), next_of(service, Outdated())) == ([], [])


def test_an_edit_is_no_judgement(service: Service) -> None:
    finished_run(service)
    service.database.write(lambda connection: touch(connection, "r"))
    assert next_of(service, Outdated()) == []
    forget_findings(service)
    service.database.write(lambda connection: touch(connection, "r"))
    assert next_of(service, Outdated()) == ["r"]


def test_one_is_handed_out_at_a_time_and_more_are_looked_for_after_a_while(service: Service) -> None:
    now = [0.0]
    outdated = Outdated(lambda: now[0])
    for run, rank in (("a", sent.P), ("b", sent.Q)):
        sent.store(service, sent.attempts(0, 3, 0, run=run, producer=rank))
    forget_findings(service)
    assert sorted(next_of(service, outdated) + next_of(service, outdated)) == ["a", "b"]
    assert next_of(service, outdated) == []
    now[0] = EVERY_S
    assert len(next_of(service, outdated)) == 1


def test_a_server_that_runs_finds_them_by_itself(service: Service) -> None:
    finished_run(service)
    forget_findings(service)
    service.compactor.start()
    sent.until(lambda: kinds(service) == ["nonfinite_forward"], 20)
    service.compactor.stop()
