"""Which run several trainings of one process belong to, told by nothing but what they do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import ampwatch
from ampwatch import recorder, spool
from ampwatch.settings import Settings

from .loops import Weighted, attempt, sgd


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """What the folder of runs holds at the end: of each run, in their order, the attempts of each of its producers."""
    recorder.finish()
    for name, value in {"DIR": str(tmp_path), "QUIET": "1", "FLUSH_S": "0.02"}.items():
        monkeypatch.setenv(f"AMPWATCH_{name}", value)

    def found():
        ampwatch.finish()
        runs: dict[str, dict[str, list[int]]] = {}
        for batch in sorted(spool.read(tmp_path), key=lambda batch: (batch.run, batch.seq)):
            producers = runs.setdefault(batch.run, {})
            numbers = producers.setdefault(batch.producer, [])
            numbers += batch.table()["attempt"].tolist() if batch.kind == "attempts" else []
        return [sorted(map(sorted, producers.values()), key=len) for producers in runs.values()]

    yield found
    recorder.finish()


def make(model=None, **given):
    return ampwatch.GradScaler("cpu", model=model, init_scale=8.0, **given)


@pytest.mark.parametrize("named", [True, False])
def test_a_sweep_in_a_loop_is_a_run_each(trained, named):
    for _ in range(3):
        model = Weighted()
        optimizer, scaler = sgd(model), make(model if named else None)
        for _ in range(4):
            attempt(scaler, model, optimizer)
    assert trained() == [[[0, 1, 2, 3]]] * 3


def test_a_scheduler_that_holds_its_optimizer_in_a_cycle_does_not_join_two_runs(trained):
    def train():
        model = Weighted()
        optimizer, scaler = torch.optim.Adam(model.parameters()), make()
        schedule = StepLR(optimizer, 1)
        for _ in range(2):
            attempt(scaler, model, optimizer)
            schedule.step()
        return model

    kept = [train(), train()]
    assert (len(kept), trained()) == (2, [[[0, 1]], [[0, 1]]])


def test_optimizers_without_a_scaler_are_told_apart_too(trained):
    for _ in range(2):
        model = Weighted()
        optimizer = ampwatch.watch_optimizer(sgd(model))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2)).backward()
            optimizer.step()
    assert trained() == [[[0, 1, 2]], [[0, 1, 2]]]


def test_pairs_of_networks_stay_together(trained):
    for _ in range(2):
        models = Weighted(), Weighted()
        pairs = [(make(model), model, sgd(model)) for model in models]
        for _ in range(2):
            for pair in pairs:
                attempt(*pair)
    assert trained() == [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]


def test_a_network_that_joins_late_joins_the_run(trained):
    first, second = Weighted(), Weighted()
    one = make(first), first, sgd(first)
    attempt(*one)
    two = make(second), second, sgd(second)
    for pair in (one, two, one):
        attempt(*pair)
    assert trained() == [[[0, 1, 2, 3]]]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("same_optimizer", [True, False])
def test_a_scaler_made_anew_at_every_epoch_goes_on_with_the_run(trained, named, same_optimizer):
    model = Weighted()
    optimizer = sgd(model)
    for _ in range(3):
        optimizer = optimizer if same_optimizer else sgd(model)
        scaler = make(model if named else None)
        attempt(scaler, model, optimizer)
    found = trained()
    assert len(found) == 1
    # Of parameters that only their optimizers knew, it is told when they are met again: by then there is another producer.
    assert found[0] == ([[0, 1, 2]] if named or same_optimizer else [[0]] * 3)


@pytest.mark.parametrize("told_by", ["scaler", "optimizer"])
def test_a_resume_within_the_process_is_another_producer_of_the_run(trained, told_by):
    def train(states):
        model = Weighted()
        optimizer, scaler = torch.optim.Adam(model.parameters()), make(model)
        if "scaler" in states:
            scaler.load_state_dict(states["scaler"])
        if "optimizer" in states:
            optimizer.load_state_dict(states["optimizer"])
        for _ in range(2):
            attempt(scaler, model, optimizer)
        return {"scaler": scaler.state_dict(), "optimizer": optimizer.state_dict()}

    states = train({})
    train({told_by: states[told_by]})
    assert trained() == [[[0, 1], [0, 1]]]


def test_a_state_of_no_steps_is_no_resume(trained):
    for _ in range(2):
        model = Weighted()
        optimizer, scaler = torch.optim.Adagrad(model.parameters()), make(model)
        attempt(scaler, model, optimizer)
    assert trained() == [[[0]], [[0]]]


def test_a_copy_and_a_named_run_are_asked_nothing(trained):
    for _ in range(2):
        model = Weighted()
        scaler = make(model, run="mine")
        attempt(scaler, model, sgd(model))
        attempt(copy.deepcopy(scaler), model, sgd(model))
    assert trained() == [[[0, 1, 2, 3]]]


def test_what_is_said_ahead_of_the_first_attempt_belongs_to_the_new_run(trained, tmp_path):
    for lr in (1.0, 2.0):
        model = Weighted()
        optimizer, scaler = sgd(model), make(model, config={"lr": lr})
        for step in range(2):
            ampwatch.log(step=10 * step, rate=lr)
            attempt(scaler, model, optimizer)
    assert trained() == [[[0, 1]], [[0, 1]]]
    tables = [batch.table() for batch in spool.read(tmp_path) if batch.kind == "attempts"]
    rows = sorted(row for t in tables for row in zip(t["log.rate"].tolist(), t["step"].tolist(), strict=True))
    assert rows == [(1.0, 0), (1.0, 10), (2.0, 0), (2.0, 10)]
    told = [e.data for b in spool.read(tmp_path) if b.kind == "events" for e in b.events() if e.type == "run"]
    assert {each["config"]["lr"] for each in told} == {1.0, 2.0}


def test_the_weights_are_those_of_torchs_scaler(trained):
    def sweep(kind):
        torch.manual_seed(0)
        weights = []
        for _ in range(2):
            model = Weighted()
            optimizer, scaler = sgd(model), kind("cpu", init_scale=8.0)
            for x in torch.randn(5, 2):
                attempt(scaler, model, optimizer, x.tolist())
            weights += model.w.tolist()
        return weights

    assert sweep(ampwatch.GradScaler) == sweep(torch.amp.GradScaler)
    assert len(trained()) == 2


def test_a_job_of_a_scheduler_numbers_its_trainings():
    from ampwatch import identity

    environ = {"SLURM_JOB_ID": "77"}
    ids = [identity.run_id(Settings(), 8, environ, trainings=n) for n in range(3)]
    assert ids == ["77", "77-1", "77-2"]
