"""A fault in any function of ours that a training loop enters: torch's results, a count, and a word in the run's header.

Which functions those are is not listed here: one run is traced, then each that it entered is broken in turn.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ampwatch
from ampwatch import recorder, spool
from ampwatch.errors import RunNotFound
from ampwatch.guard import failures
from ampwatch.settings import Settings

torch.set_num_threads(1)

# What carries the guard, and so cannot be under it: the guard itself, torch's methods as they are overridden, and
# the question whether a graph is being compiled, which has to come before. To make a scaler is a boundary: what fails
# there may be raised, as a wrong setting is.
NOT_GUARDED = {
    *("guard", "is_compiled", "Hook.__call__", "SoftmaxRows.__torch_dispatch__"),
    *("Guard.__init__", "Guard.__enter__", "Guard.__exit__"),
    *("Around.__init__", "Around.__enter__", "Around.__exit__"),
    *("Watched.scale", "Watched.unscale_", "Watched._unscale_grads_", "Watched.step", "Watched.update"),
    *("Watched.load_state_dict", "Watched._ask"),
    *("GradScaler.__init__", "attach", "given_of", "source_of", "check"),
    *("finish", "_finish_all"),
}
# Where these have failed there is nothing that could record it, or no longer: the job's log has a warning.
NOTHING_RECORDS = {"recorder.start", "recorder.finish", "recorder.close"}
WITHOUT_A_RECORDER = ("identity", "logbook", "recorder")  # not made, or not to be told anything
PACKAGE = Path(ampwatch.__path__[0])
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in (*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("stats/[!_]*.py"))
    if path.stem not in ("settings", "triton_kernel")
)


def train(scaler, model):
    """Two optimizers, clipping, accumulation, growth, and skips with a loss that is not finite."""
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]
    for step in range(5):
        for part in range(2 if step in (0, 3) else 1):
            x = torch.full((2, 4), torch.nan if step in (1, 2) else 1.0 + part)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    return [p.tolist() for p in model.parameters()], repr(scaler.state_dict())


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def torchs():
    return train(torch.amp.GradScaler("cpu", growth_interval=2), small_model())


def ours(directory):
    model = small_model()
    settings = Settings(dir=directory, flush_s=60, quiet=True, project="p")
    scaler = ampwatch.GradScaler("cpu", growth_interval=2, model=model, settings=settings)
    result = train(scaler, model)
    ampwatch.finish()
    return result


def headers(directory):
    """The data of the `run` events, of all that was recorded."""
    try:
        batches = [batch for batch in spool.read(directory) if batch.kind == "events"]
    except RunNotFound:
        return []
    return [event.data for batch in batches for event in batch.events() if event.type == "run"]


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """Code that the training thread enters in a run, when what is asked once in a process is known."""
    ours(tmp_path_factory.mktemp("first"))
    seen = set()
    sys.setprofile(lambda frame, what, _: seen.add(frame.f_code) if what == "call" else None)
    try:
        ours(tmp_path_factory.mktemp("traced"))
    finally:
        sys.setprofile(None)
    return seen


def functions_of(module):
    """Functions and methods that a module defines, by their qualified names."""
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            members = [m for each in vars(value).values() for m in (getattr(each, "fget", None), each)]
        else:
            members = [value]
        for member in members:
            function = inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield function.__qualname__, function


def broken(*_args, **_kwargs):
    return 1 / 0


def outcome_with(function, directory, monkeypatch):
    """The training's result while this function of ours is broken; and the faults in the run's header."""
    code = broken.__code__.replace(co_freevars=function.__code__.co_freevars)
    failures.clear()
    with monkeypatch.context() as patched:
        patched.setattr(function, "__code__", code)
        result = ours(directory)
    recorder._current.clear()
    return result, [header["faults"] for header in headers(directory) if header["faults"]]


@pytest.mark.parametrize("name", MODULES)
def test_a_fault_in_any_function_that_a_loop_enters(name, entered, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    expected, wrong = torchs(), {}
    for qualified, function in dict(functions_of(importlib.import_module(name))).items():
        if function.__code__ not in entered or qualified in NOT_GUARDED:
            continue
        caplog.clear()
        result, told = outcome_with(function, tmp_path / qualified, monkeypatch)
        if name.endswith(WITHOUT_A_RECORDER) or failures.keys() & NOTHING_RECORDS:
            told = "Training goes on" in caplog.text
        if not (result == expected and failures and told):
            wrong[qualified] = result == expected, dict(failures), told
    failures.clear()
    assert wrong == {}
