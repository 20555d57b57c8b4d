"""What is recorded of an optimizer without a scaler, on real loops, and that it trains as without ampwatch."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import ampwatch
from ampwatch.errors import SettingsError
from ampwatch.optimizer import StepWatch
from ampwatch.records import is_missing
from ampwatch.stats.layout import SCALARS

from .recorded import WORKING, MemoryRecorder
from .recorded import scaler as make


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    torch.manual_seed(0)


@pytest.fixture(params=WORKING)
def recorder(request):
    return MemoryRecorder(statistics=request.param)


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(model, step, dtype=torch.bfloat16):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


def train(model, optimizer, steps=4, dtype=torch.bfloat16, parts=1):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            (loss_of(model, step * parts + part, dtype) / parts).backward()
        optimizer.step()


def closing(model, optimizer, steps=4):
    """A loop that hands the optimizer a closure, as LBFGS wants it."""
    for step in range(steps):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step, torch.float32)
            loss.backward()
            return loss

        optimizer.step(closure)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def test_a_row_by_hand(recorder):
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert ampwatch.watch_optimizer(optimizer, model=model, recorder=recorder) is optimizer
    (model.w * torch.tensor([3.0, 0.0])).sum().backward()
    optimizer.step()
    expected = {"attempt": 0, "stream": 0, "scale": 1.0, "scale_after": 1.0, "found_inf": 0, "stepped": 1}
    expected |= {"skipped": 0, "numel": 2, "n_zero": 1, "max_abs": 3.0, "norm": 3.0, "lr": 0.5, "losses": 0}
    assert {name: recorder.column(name)[0] for name in expected} == expected
    assert is_missing(recorder.column("loss"))
    assert recorder.data("tensors")[0]["tensors"][0]["name"] == "w"
    assert recorder.data("calls") == [{"order": ["step:0"]}]


def test_it_says_that_there_is_no_scaler(recorder):
    train(network(), ampwatch.watch_optimizer(torch.optim.SGD(network().parameters()), recorder=recorder))
    (told,) = recorder.data("scaler")
    assert (told["policy"], told["enabled"], told["asked"], told["class"]) == ("none", False, False, "")
    assert recorder.description["statistics"] == recorder.settings.statistics


def test_statistics_are_those_of_the_gradients(recorder):
    model = network()
    optimizer = ampwatch.watch_optimizer(torch.optim.Adam(model.parameters()), recorder=recorder)
    train(model, optimizer, steps=1)
    grads = [p.grad.double() for p in model.parameters()]
    assert recorder.tensors("max_abs") == [g.abs().max().item() for g in grads]
    assert recorder.tensors("numel") == [g.numel() for g in grads]
    assert recorder.tensors("sum_sq") == pytest.approx([g.square().sum().item() for g in grads], rel=1e-5)
    assert {"n_inf", "n_nan", "n_zero"} < set(SCALARS)


FORMS = [
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "foreach": False}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.Adafactor, {"lr": 1e-2}),
]


@pytest.mark.parametrize(("kind", "options"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_trains_to_the_same_bits(recorder, kind, options, dtype):
    ours = network()
    theirs = copy.deepcopy(ours)
    optimizers = [kind(m.parameters(), **options) for m in (ours, theirs)]
    ampwatch.watch_optimizer(optimizers[0], model=ours, recorder=recorder)
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        train(model, optimizer, steps=12, dtype=dtype, parts=2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)
    torch.testing.assert_close(*(o.state_dict() for o in optimizers), rtol=0, atol=0)
    assert recorder.column("micro_batches")[1:] == [2] * 11
    assert recorder.events("fault") == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_is_looked_at_when_it_has_been_evaluated(recorder, kind):
    ours = network()
    theirs, first = copy.deepcopy(ours), copy.deepcopy(ours)
    for model in (ours, theirs):
        optimizer = kind(model.parameters(), lr=0.1)
        if model is ours:
            ampwatch.watch_optimizer(optimizer, model=model, recorder=recorder)
        closing(model, optimizer)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert recorder.column("loss")[0] == loss_of(first, 0, torch.float32).item()
    assert recorder.column("losses") == [1] * 4
    assert recorder.column("residue") == [0] * 4


def test_a_closure_by_name(recorder):
    model = Weighted()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), recorder=recorder)

    def closure():
        optimizer.zero_grad()
        loss = (model.w * 3).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure=closure).item() == 6.0
    assert (recorder.column("loss"), recorder.column("max_abs")) == ([6.0], [3.0])


def test_the_loss_that_is_logged_stands_in_the_row(recorder):
    model = network()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2), recorder=recorder)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        recorder.logbook.add("loss", loss)
        losses.append(loss.item())
        optimizer.step()
    assert recorder.column("loss") == losses


def test_several_optimizers_are_streams_of_one_run(recorder):
    models = [network(), network()]
    optimizers = [
        ampwatch.watch_optimizer(torch.optim.SGD(m.parameters(), lr=1e-2), model=m, recorder=recorder)
        for m in models
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert recorder.column("attempt") == list(range(6))
    assert recorder.column("stream") == [0, 1] * 3
    assert recorder.column("stepped") == [1, 2] * 3
    assert recorder.column("step") == [0, 0, 1, 1, 2, 2]


def test_gradients_that_are_not_finite_were_applied(recorder):
    model = Weighted()
    optimizer = ampwatch.watch_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), model=model, recorder=recorder
    )
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        (model.w * factor).sum().backward()
        optimizer.step()
    assert recorder.column("applied_nonfinite") == [0, 1, 0]
    assert recorder.column("found_inf") == [0, 0, 0]
    assert [c["parameters"]["count"] for c in recorder.data("finite_check")] == [0, 1]


def test_a_scaler_that_is_watched_records_its_own_optimizers(recorder):
    model = network()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2), recorder=recorder)
    scaler = make(recorder, model=model, init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, torch.float16)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert recorder.column("scale") == [64.0] * 3
    assert [told["policy"] for told in recorder.data("scaler")] == ["torch"]


def test_watching_twice_is_watching_once(recorder):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        ampwatch.watch_optimizer(optimizer, recorder=recorder)
    train(model, optimizer)
    assert recorder.column("attempt") == list(range(4))


class Outer(torch.optim.SGD):
    """A step that calls the step of the class below, which torch hooks as well."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_within_a_step_is_one(recorder):
    torch.optim.SGD([torch.ones(1)])  # from here on torch hooks the inner one, too
    model = network()
    optimizer = ampwatch.watch_optimizer(Outer(model.parameters(), lr=1e-2), recorder=recorder)
    train(model, optimizer)
    assert recorder.column("attempt") == list(range(4))


def test_a_step_that_raises_is_no_attempt(recorder):
    model = Weighted()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), recorder=recorder)

    def closure():
        raise KeyError("data")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    model.w.sum().backward()
    optimizer.step()
    assert recorder.column("numel") == [2]


def test_a_fault_of_ours_leaves_training_as_it_was(recorder, monkeypatch):
    monkeypatch.delenv("AMPWATCH_STRICT")
    ours = network()
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-2)
    ampwatch.watch_optimizer(optimizer, model=ours, recorder=recorder)
    monkeypatch.setattr(recorder, "next_attempt", None)
    monkeypatch.setattr("ampwatch.optimizer.lrs_of", lambda _: 1 / 0)
    train(ours, optimizer)
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=1e-2))
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert {fault["where"] for fault in recorder.data("fault")} == {"optimizer.before"}


def test_each_attempt_says_which_step_it_is_and_the_rates_of_its_groups(recorder):
    """The step is that of state["step"], which a resumed optimizer brings along."""
    models = [network(), network()]
    groups = [{"params": m.parameters(), "lr": lr} for m, lr in zip(models, (0.5, 0.25), strict=True)]
    optimizer = torch.optim.Adam(groups)
    for step in range(5):
        if step == 2:
            ampwatch.watch_optimizer(optimizer, recorder=recorder)
        sum(loss_of(m, step, torch.float32) for m in models).backward()
        optimizer.step()
        optimizer.param_groups[1]["lr"] *= 2
    names = ("optimizer.0.step", "optimizer.0.lr.0", "optimizer.0.lr.1", "lr", "updates")
    assert [recorder.column(name) for name in names] == [
        [3, 4, 5],
        [0.5] * 3,
        [1.0, 2.0, 4.0],
        [0.5] * 3,
        [-1, 1, 1],
    ]


def test_it_is_watched_anew_after_the_end_and_another_listener_is_told(recorder):
    model, second = network(), MemoryRecorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for heard in (None, print):
        ampwatch.watch_optimizer(optimizer, model=model, recorder=recorder, on_finding=heard)
    train(model, optimizer, steps=1)
    recorder.finished = True
    train(model, optimizer, steps=1)
    ampwatch.watch_optimizer(optimizer, model=model, recorder=second)
    train(model, optimizer, steps=1)
    assert (recorder.column("attempt"), second.column("attempt"), recorder.listeners) == ([0], [0], [print])


def test_the_watch_goes_with_its_optimizer(recorder):
    model = network()
    optimizer = ampwatch.watch_optimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), model=model, recorder=recorder
    )
    train(model, optimizer)
    del optimizer
    gc.collect()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert recorder.sources[0].harvest(final=True).is_last


def test_a_copied_and_a_pickled_optimizer_are_plain(recorder):
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(network().parameters()), recorder=recorder)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not getattr(other, "_optimizer_step_pre_hooks", {})


def test_in_a_forked_child_it_is_another_producer(recorder):
    model = network()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2), recorder=recorder)
    train(model, optimizer, steps=1)
    recorder.producer, recorder.sources = "1" * 32, []
    recorder._attempts = 0
    train(model, optimizer, steps=2)
    assert recorder.column("attempt") == [0, 1]


def test_a_recorder_that_has_finished_is_told_nothing(recorder):
    model = network()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2), recorder=recorder)
    recorder.finished = True
    train(model, optimizer)
    assert recorder.events() == []


def test_a_setting_that_cannot_be_used_is_refused():
    optimizer = torch.optim.SGD(network().parameters())
    with pytest.raises(SettingsError, match="statistics"):
        ampwatch.watch_optimizer(optimizer, settings=ampwatch.Settings(statistics="best"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself loads
def test_compiled_steps_are_left_alone(recorder):
    model = Weighted()
    optimizer = ampwatch.watch_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), recorder=recorder)
    model.w.sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    assert model.w.tolist() == [0.5, 0.5]
    assert recorder.events("fault") == []


def real_memory(size):
    with _disable_current_modes():
        vector = torch.zeros(size, dtype=torch.float64, device="cpu")
        return vector, vector.numpy()


def test_a_step_never_waits_for_a_cuda_device():
    """Fake CUDA tensors have no values, so whatever reads one raises."""
    watch = StepWatch(MemoryRecorder(statistics="reference"), memory=real_memory)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        parameter = nn.Parameter(torch.ones(70))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(3):
            parameter.grad = torch.ones(70)
            watch.before(optimizer, (optimizer,), {})
            optimizer.step()
    assert len(watch._dispatch._ring) == 3
