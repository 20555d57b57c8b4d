"""A fault in any function of ours that a training loop enters: torch's results, a count, and a word in the run's header.

Which functions those are is not listed here: loops are traced, then each function that one entered, or the recorder's
thread beside it, is broken in it.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import sys
import threading
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
# there may be raised, as a wrong setting is. What `_number` raises is told as the user's: it asks the user's object.
NOT_GUARDED = {
    *("guard", "is_compiled", "Hook.__call__", "SoftmaxRows.__torch_dispatch__"),
    *("Guard.__init__", "Guard.__enter__", "Guard.__exit__"),
    *("Around.__init__", "Around.__enter__", "Around.__exit__", "Worker._loop", "Worker._flush"),
    *("GradScaler.scale", "GradScaler.unscale_", "GradScaler._unscale_grads_", "GradScaler.step"),
    *("GradScaler.update", "GradScaler.load_state_dict", "Watched._ask"),
    *("GradScaler.__init__", "attach", "given_of", "source_of", "check"),
    *(
        "watch_optimizer",
        "_innermost",
        "_BeforeStep.__call__",
        "finish",
        "_finish_all",
        "log",
        "Recorder.log",
        "_number",
    ),
}
# Where these have failed there is nothing that could record it, or no longer: the job's log has a warning.
NOTHING_RECORDS = {
    *("recorder.start", "recorder.open", "recorder.flush", "recorder.node"),
    *("recorder.finish", "recorder.close", "recorder.close_spool"),
}
WITHOUT_A_RECORDER = ("identity", "logbook", "recorder", "succession")  # not made, or not to be told anything
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


def train_unscaled(watched, model):
    """Closures, accumulation, a loss that is logged and one that the model answers, and gradients that are not finite."""
    optimizer = watched(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        x = torch.full((2, 4), torch.nan if step == 3 else 1.0)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure)
        else:
            loss = closure()
            model(x).mean().backward()
            ampwatch.log(step=step, loss=loss.item())
            optimizer.step()
    return [p.tolist() for p in model.parameters()]


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def scaled(model, settings):
    if settings is None:
        return train(torch.amp.GradScaler("cpu", growth_interval=2), model)
    return train(ampwatch.GradScaler("cpu", growth_interval=2, model=model, settings=settings), model)


def unscaled(model, settings):
    def watched(optimizer):
        return ampwatch.watch_optimizer(optimizer, model=model, settings=settings)

    return train_unscaled(watched if settings else lambda optimizer: optimizer, model)


LOOPS = (scaled, unscaled)


@functools.cache
def torchs(loop):
    return repr(loop(small_model(), None))


def ours(loop, directory):
    result = loop(small_model(), Settings(dir=directory, flush_s=60, quiet=True, project="p"))
    ampwatch.finish()
    return repr(result)


def headers(directory):
    """The data of the `run` events, of all that was recorded."""
    try:
        batches = [batch for batch in spool.read(directory) if batch.kind == "events"]
    except RunNotFound:
        return []
    return [event.data for batch in batches for event in batch.events() if event.type == "run"]


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """The first loop in which a code is entered, once what a process is asked once is known."""
    seen = {}

    def note(loop, frame, what, _):
        if what == "call":
            seen.setdefault(frame.f_code, loop)

    for loop in LOOPS:
        ours(loop, tmp_path_factory.mktemp("first"))
        gc.collect()
        gc.disable()  # what closes the watch of the loop before would be entered as by chance
        for setprofile in (
            threading.setprofile,
            sys.setprofile,
        ):  # of the threads that will start, and of this one
            setprofile(functools.partial(note, loop))
        try:
            ours(loop, tmp_path_factory.mktemp("traced"))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            gc.enable()
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


def outcome_with(function, loop, directory, monkeypatch):
    """The training's result while this function of ours is broken; and the faults in the run's header."""
    code = broken.__code__.replace(co_freevars=function.__code__.co_freevars)
    failures.clear()
    with monkeypatch.context() as patched:
        patched.setattr(function, "__code__", code)
        result = ours(loop, directory)
    recorder._current.clear()
    return result, [header["faults"] for header in headers(directory) if header["faults"]]


@pytest.mark.parametrize("name", MODULES)
def test_a_fault_in_any_function_that_a_loop_enters(name, entered, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    wrong = {}
    for qualified, function in dict(functions_of(importlib.import_module(name))).items():
        if function.__code__ not in entered or qualified in NOT_GUARDED:
            continue
        caplog.clear()
        loop = entered[function.__code__]
        result, told = outcome_with(function, loop, tmp_path / qualified, monkeypatch)
        if name.endswith(WITHOUT_A_RECORDER) or failures.keys() & NOTHING_RECORDS:
            told = "Training goes on" in caplog.text
        is_torchs = result == torchs(loop)
        if not (is_torchs and failures and told):
            wrong[qualified] = is_torchs, dict(failures), told
    failures.clear()
    assert wrong == {}
