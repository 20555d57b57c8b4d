"""What the scaler records, on real loops; that it is torch's is proved in test_lockstep.py."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ampwatch
from ampwatch.errors import SettingsError
from ampwatch.records import is_missing
from ampwatch.settings import Settings
from ampwatch.watching import Watch

from .recorded import WORKING, MemoryRecorder
from .recorded import scaler as make


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    torch.manual_seed(0)


@pytest.fixture(params=WORKING)
def recorder(request):
    return MemoryRecorder(statistics=request.param)


class Weighted(nn.Module):
    """loss = w · x, so that the gradient of w is x."""

    def __init__(self, size=2):
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return (self.w * x).sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def attempt(scaler, model, optimizer, x=(3.0, 0.0)):
    optimizer.zero_grad()
    scaler.scale(model(torch.tensor(x))).backward()
    scaler.step(optimizer)
    scaler.update()


def network(*widths):
    layers = []
    for sizes in itertools.pairwise(widths):
        layers += [nn.Linear(*sizes), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def half(model, x):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(x).float().square().mean()


def test_a_row_by_hand(recorder):
    model = Weighted()
    attempt(make(recorder, init_scale=4.0), model, sgd(model))
    expected = {
        "attempt": 0, "stream": 0, "step": 0, "scale": 4.0, "scale_after": 4.0, "growth_tracker": 1, "found_inf": 0,
        "stepped": 1, "skipped": 0, "losses": 1, "loss": 3.0, "norm": 3.0, "max_abs": 12.0, "numel": 2, "n_inf": 0,
        "n_nan": 0, "n_zero": 1, "n_subnormal": 0, "n_below": 0, "lr": 0.5, "applied_nonfinite": 0,
    }  # fmt: skip
    assert {name: recorder.column(name)[0] for name in expected} == expected


def test_a_tensor_row_by_hand(recorder):
    model = Weighted()
    attempt(make(recorder, init_scale=4.0), model, sgd(model), x=(3.0, math.inf))
    names = ("attempt", "tensor", "scale", "numel", "n_inf", "n_zero", "n_offgrid", "max_abs", "sum_sq")
    assert [recorder.tensors(name) for name in names] == [
        [0],
        [0],
        [4.0],
        [2],
        [1],
        [0],
        [0],
        [12.0],
        [144.0],
    ]


def test_a_skip_tells_where_and_how_many(recorder):
    model = Weighted()
    attempt(make(recorder, init_scale=4.0), model, sgd(model), x=(math.inf, math.nan))
    (skip,) = recorder.data("skip")
    assert math.isnan(skip.pop("loss"))
    assert skip == {
        "scale": 4.0, "scale_after": 2.0, "optimizers": [0], "n_inf": 1, "n_nan": 1, "tensors": [0], "count": 1,
    }  # fmt: skip
    assert is_missing(recorder.column("norm")).all()
    assert is_missing(recorder.column("headroom_log2")).all()


def test_changes_of_the_scale(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, init_scale=4.0, growth_interval=1)
    attempt(scaler, model, optimizer)
    attempt(scaler, model, optimizer, x=(math.inf, 0.0))
    scaler.update(16.0)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
    changes = recorder.events("growth", "backoff", "set", "restored")
    assert [(e.type, e.attempt, e.data["scale"], e.data["scale_after"]) for e in changes] == [
        ("restored", 3, 16.0, 2.0),
        ("growth", 0, 4.0, 8.0),
        ("backoff", 1, 8.0, 4.0),
        ("set", 2, 4.0, 16.0),
    ]


def test_statistics_are_those_before_unscaling_whatever_the_call(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, init_scale=4.0)
    scaler.scale(model(torch.tensor([3.0, 0.0]))).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    assert (recorder.column("max_abs"), recorder.column("norm")) == ([12.0], [3.0])


@pytest.mark.parametrize("unscaled", [False, True])
def test_fused_optimizers_are_seen_before_they_unscale(recorder, unscaled):
    model = Weighted()
    optimizer, scaler = torch.optim.Adam(model.parameters(), fused=True), make(recorder, init_scale=4.0)
    scaler.scale(model(torch.tensor([3.0, 0.0]))).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (recorder.column("max_abs"), recorder.data("optimizers")[0]["optimizers"][0]["fused"]) == (
        [12.0],
        True,
    )


def test_a_reciprocal_that_overflows_is_flagged(recorder):
    model = Weighted()
    for scale, fused in ((2.0**-130, False), (2.0**-130, True), (2.0**-120, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
        attempt(make(recorder, init_scale=scale), model, optimizer)
    assert recorder.column("found_inf") == [0, 0, 0]
    assert recorder.column("applied_nonfinite") == [1, 0, 0]


def test_sparse_gradients_are_taken_as_torch_checks_them(recorder):
    model = nn.Embedding(10, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(recorder, init_scale=4.0)
    scaler.scale(model(torch.tensor([1, 1, 7])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (recorder.column("numel"), recorder.column("max_abs")) == ([6], [4.0])


def test_accumulation_is_counted(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    for _ in range(2):
        for loss in (1.0, 3.0):
            scaler.scale(model(torch.tensor([loss, 0.0])) / model.w[0].detach()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [recorder.column(name) for name in ("losses", "micro_batches")] == [[2, 2], [-1, 2]]
    assert recorder.column("loss") == [2.0, 2.0]


def test_a_loss_changed_in_place_afterwards_is_kept_as_it_was(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    loss = model(torch.tensor([3.0, 0.0]))
    scaler.scale(loss).backward()
    loss.detach().zero_()
    scaler.step(optimizer)
    scaler.update()
    assert recorder.column("loss") == [3.0]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.1], 0.1),
        ([-0.0], -0.0),
        ([1.0, 2.0, 6.0], 3.0),
        ([1.0, math.inf], math.inf),
        ([math.nan, 1.0], math.nan),
    ],
)
def test_the_loss_is_the_mean_of_what_was_scaled(losses, expected, recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    model(torch.tensor([3.0, 0.0])).backward()
    for loss in losses:
        scaler.scale(torch.tensor(loss, dtype=torch.float64))
    scaler.step(optimizer)
    scaler.update()
    assert repr(recorder.column("loss")) == repr([expected])


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_losses_without_an_update_do_not_pile_up(recorder):
    scaler = make(recorder)
    scaler.scale(torch.ones(()))
    before = tensors_alive()
    for _ in range(10_000):
        scaler.scale(torch.ones(()))
    assert tensors_alive() - before < 10


def test_a_lazy_loss_is_missing_and_not_used_up(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    (scaled,) = scaler.scale(loss for loss in [model(torch.tensor([3.0, 0.0]))])
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert is_missing(recorder.column("loss")).tolist() == [True]


def test_the_dtype_of_the_loss(recorder):
    scaler = make(recorder)
    for dtype in (torch.float32, torch.float32, torch.float16):
        scaler.scale(torch.ones((), dtype=dtype))
    assert recorder.data("loss_dtype") == [{"dtype": "float32"}, {"dtype": "float16"}]


def test_steps_are_those_taken_or_the_users_own(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    for i, x in enumerate([(1.0, 0.0), (math.inf, 0.0), (1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]):
        attempt(scaler, model, optimizer, x)
        if i == 3:
            recorder.logbook.add("step", 100)
            recorder.logbook.add("reward", 0.5)
    assert recorder.column("step") == [0, 1, 1, 100, 101]
    assert recorder.column("log.reward")[3] == 0.5
    assert is_missing(recorder.column("log.reward")).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("place", ["top", "under way", "after"])
def test_what_is_logged_belongs_to_its_own_iteration_wherever_it_stands(recorder, place):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)

    def log(here, i):
        if here == place:
            recorder.logbook.add("step", 10 * i)

    for i in range(3):
        log("top", i)
        scaler.scale(model(torch.ones(2))).backward()
        log("under way", i)
        scaler.step(optimizer)
        scaler.update()
        log("after", i)
    assert recorder.column("step") == [0, 10, 20]


def test_names_come_from_the_model(recorder):
    model = network(4, 8, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model)
    scaler.scale(half(model, torch.ones(2, 4))).backward()
    scaler.step(optimizer)
    tensors = recorder.data("tensors")[0]["tensors"]
    assert tensors[2] == {
        "id": 2, "name": "2.weight", "module": "2", "module_type": "Linear", "shape": [1, 8], "dtype": "float32",
        "numel": 8, "placements": None, "optimizer": 0,
    }  # fmt: skip


def test_without_a_model_names_come_from_the_optimizer(recorder):
    model = Weighted()
    attempt(make(recorder), model, sgd(model))
    assert recorder.data("tensors")[0]["tensors"][0]["name"] == "optimizer.0.param.0"


def test_a_gan_has_two_streams(recorder):
    models = [Weighted(), Weighted()]
    optimizers, scaler = [sgd(m) for m in models], make(recorder)
    for i in (0, 1, 0, 1):
        attempt(scaler, models[i], optimizers[i])
    assert recorder.column("stream") == [0, 1, 0, 1]
    assert [s["optimizers"] for s in recorder.data("stream")] == [[0], [1]]
    assert len(recorder.data("calls")) == 2
    assert recorder.data("call_fault") == []


def test_what_an_attempt_says_of_each_optimizer(recorder):
    """Two in one attempt, the first with two groups and its gradient not finite in the second attempt."""
    models = [Weighted(), Weighted(), Weighted()]
    groups = [{"params": models[0].parameters(), "lr": 0.5}, {"params": models[1].parameters(), "lr": 0.25}]
    optimizers = [torch.optim.Adam(groups), torch.optim.Adagrad(models[2].parameters(), lr=1.0)]
    scaler = make(recorder, init_scale=4.0)
    for x in (3.0, math.inf, 3.0):
        for model, each in zip(models, (x, 4.0, 2.0), strict=True):
            model.zero_grad()
            scaler.scale(model(torch.tensor([each, 0.0]))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    said = {name: recorder.column(f"optimizer.{name}") for name in ("0.step", "1.step", "0.norm", "1.norm")}
    assert is_missing(said["0.norm"]).tolist() == [False, True, False]
    assert [said["0.norm"][0], *said.pop("0.norm")[2:]] == [5.0, 5.0]
    assert said == {"0.step": [1, 1, 2], "1.step": [1, 2, 3], "1.norm": [2.0] * 3}
    assert [recorder.column(f"optimizer.{name}")[0] for name in ("0.lr.0", "0.lr.1", "1.lr.0")] == [
        0.5,
        0.25,
        1.0,
    ]
    assert (recorder.column("stepped"), recorder.column("skipped")) == ([3, 3, 3], [0, 1, 0])


def test_a_step_outside_the_scaler_stands_in_the_order_of_calls(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    optimizer.step()
    attempt(scaler, model, optimizer)
    assert recorder.data("calls")[1]["order"] == ["outside:0", "scale", "step:0", "update"]


def test_a_scaler_made_anew_replaces_the_one_before(recorder):
    model = Weighted()
    optimizer = sgd(model)
    for _ in range(2):
        attempt(make(recorder), model, optimizer)
    assert [(s["scaler"], s["replaces"]) for s in recorder.data("scaler")] == [(0, None), (1, 0)]
    assert len(recorder.data("optimizers")) == 1


def test_optimizers_of_another_scaler_are_not_replaced(recorder):
    for _ in range(2):
        model = Weighted()
        attempt(make(recorder), model, sgd(model))
    assert [s["replaces"] for s in recorder.data("scaler")] == [None, None]


def test_calls_are_told_once_and_when_they_change(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    attempt(scaler, model, optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert [(e.attempt, e.data["order"]) for e in recorder.events("calls")] == [
        (0, ["scale", "step:0", "update"]),
        (2, ["scale", "unscale_:0", "step:0", "update"]),
    ]


def test_a_refused_call_is_told_and_torchs_exception_passes(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="has already been called"):
        scaler.unscale_(optimizer)
    (fault,) = recorder.events("call_fault")
    assert (fault.attempt, fault.data) == (
        1,
        {
            "fault": "unscale_twice",
            "optimizer": 0,
            "order": ["scale", "unscale_:0", "unscale_:0"],
            "raised": True,
        },
    )


def faults_of(recorder):
    return [(f["fault"], f["optimizer"], f["raised"]) for f in recorder.data("call_fault")]


def test_a_step_outside_the_scaler_is_told(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    optimizer.step()
    assert faults_of(recorder) == [("step_outside_scaler", 0, False)]


@pytest.mark.parametrize("after", ["scale", "unscale_", "step"])
def test_an_exception_of_the_user_ends_no_recording(recorder, after):
    """A loop that goes on with the next batch: what torch makes of the calls since, it makes of ours."""

    def run(scaler):
        model = Weighted()
        optimizer, said = sgd(model), []
        for i in range(4):
            try:
                scaler.scale(model(torch.ones(2))).backward()
                for call in ("scale", "unscale_", "step"):
                    if call != "scale":
                        getattr(scaler, call)(optimizer)
                    if i == 1 and call == after:
                        raise ValueError("the user's")
                scaler.update()
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
                optimizer.zero_grad()
        return said, model.w.tolist(), scaler.state_dict()

    assert run(make(recorder)) == run(torch.amp.GradScaler("cpu"))
    assert recorder.column("attempt") == list(range(3 if after == "scale" else 1))


def test_an_optimizer_that_is_never_scaled_may_step_as_it_likes(recorder):
    model, temperature = Weighted(), Weighted()
    optimizer, other, scaler = sgd(model), sgd(temperature), make(recorder)
    for _ in range(3):
        attempt(scaler, model, optimizer)
        temperature(torch.ones(2)).backward()
        other.step()
    assert faults_of(recorder) == []


def test_unscaling_inside_an_accumulation_is_told_in_the_first_iteration(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.unscale_(optimizer)
    scaler.scale(model(torch.ones(2))).backward()
    scaler.step(optimizer)
    assert faults_of(recorder) == [("unscale_in_accumulation", 0, False)]


def test_the_gradient_penalty_recipe_is_healthy(recorder):
    model = network(3, 8, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        loss = model(x).sum()
        (grad,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
        scaler.scale(loss + (grad / scaler.get_scale()).norm()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (faults_of(recorder), recorder.column("losses")) == ([], [2, 2, 2])


def overflowing():
    """Finite weights whose second layer leaves the range of float16."""
    model = network(4, 4, 4, 4)
    for layer, gain in ((0, 200.0), (2, 400.0), (4, 1.0)):
        nn.init.constant_(model[layer].weight, gain)
        nn.init.zeros_(model[layer].bias)
    return model


def test_a_forward_overflow_is_traced_to_its_module(recorder):
    model = overflowing()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    (search,) = recorder.events("forward_search")
    assert (search.attempt, search.data["origin"]["module"]) == (2, "2")
    assert [e.attempt for e in recorder.events("finite_check")] == [0, 0, 1, 3]


def test_an_overflow_in_a_later_micro_batch_is_traced_too(recorder):
    model = overflowing()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    for _ in range(3):
        optimizer.zero_grad()
        for x in (torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 4)):
            scaler.scale(half(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            half(model, torch.zeros(2, 4))
    (search,) = recorder.events("forward_search")
    assert (search.attempt, search.data["origin"]["module"]) == (2, "2")


def test_the_search_is_of_an_attempt_of_the_stream_that_breaks(recorder):
    model = nn.ModuleList([overflowing(), network(4, 4, 1)])
    optimizers, scaler = [sgd(part) for part in model], make(recorder, model=model)
    for i in (0, 1, 0, 1, 1, 0):
        optimizers[i].zero_grad()
        scaler.scale(half(model[i], torch.ones(2, 4))).backward()
        scaler.step(optimizers[i])
        scaler.update()
    (search,) = recorder.events("forward_search")
    assert (search.attempt, search.stream, search.data["origin"]["module"]) == (5, 0, "0.2")


def test_a_search_does_not_wait_for_ever(recorder):
    model = nn.ModuleList([overflowing(), Weighted()])
    optimizers, scaler = [sgd(part) for part in model], make(recorder, model=model)
    for _ in range(2):
        scaler.scale(half(model[0], torch.ones(2, 4))).backward()
        scaler.step(optimizers[0])
        scaler.update()
    assert model[1]._forward_hooks
    for _ in range(65):
        attempt(scaler, model[1], optimizers[1], x=(0.0, 0.0))
    assert (len(model[1]._forward_hooks), recorder.data("forward_search")) == (0, [])


def test_buffers_that_the_first_pass_poisons_are_told_at_once(recorder):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[0].weight, 1.0)
    optimizer, scaler = sgd(model), make(recorder, model=model)
    scaler.scale(half(model, torch.full((2, 4), 6e4))).backward()
    scaler.step(optimizer)
    scaler.update()
    first = recorder.events("finite_check")[0]
    poisoned = {"checked": 2, "nonfinite": ["1.running_mean", "1.running_var"], "count": 2}
    assert (first.attempt, first.data["buffers"]) == (0, poisoned)


def test_the_first_pass_tells_autocast_order_and_origin(recorder):
    model = network(16, 64, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model, init_scale=256.0)
    scaler.scale(half(model, torch.randn(8, 16))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert recorder.data("autocast") == [{"dtype": "float16", "device": "cpu"}]
    assert sorted(recorder.data("backward_order")[0]["tensors"]) == [0, 1, 2, 3]
    assert recorder.data("origin")[0]["origins"]["0"] == "float16"
    assert not is_missing(recorder.column("headroom_log2"))


def test_without_a_model_the_origin_is_seen_one_attempt_later(recorder):
    model = network(16, 64, 1)
    optimizer, scaler = sgd(model), make(recorder, init_scale=256.0)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.randn(8, 16))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [(e.type, e.attempt) for e in recorder.events("origin", "backward_order")] == [
        ("origin", 1),
        ("backward_order", 1),
    ]


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize(
    ("factor", "looks"),
    [
        (
            [math.nan] * 3 + [1.0] * 7,
            [0, 1, 2, 4],
        ),  # 4: a power of two, and the one after the first clean attempt
        ([math.nan] * 5 + [1.0] * 5, [0, 1, 2, 4, 6]),
        ([2.0**-40] * 7 + [1.0] * 3, [0, 1, 2, 4, 8]),  # all underflow, clean
        ([1.0] * 10, [0]),
    ],
)
def test_the_origin_is_looked_at_until_some_is_known(recorder, factor, looks, with_model):
    model = network(16, 64, 1)
    optimizer = sgd(model)
    scaler = make(recorder, model=model if with_model else None, init_scale=256.0)
    for each in factor:
        optimizer.zero_grad()
        scaler.scale(half(model, torch.randn(8, 16)) * each).backward()
        scaler.step(optimizer)
        scaler.update()
    found = [e.attempt for e in recorder.events("origin")]
    assert found == (looks if with_model else looks[1:] or [1])
    assert recorder.data("origin")[-1]["origins"]["0"] == "float16"


def test_tensors_are_recorded_densely_then_every_so_often(recorder):
    recorder.settings = Settings(tensor_every=25)
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, growth_interval=1000)
    for i in range(120):
        attempt(scaler, model, optimizer, x=(math.inf if i in (70, 71) else 1.0, 0.0))
    assert sorted(recorder.tensors("attempt")) == [*range(76), 100]  # with what was around 70


def test_a_disabled_scaler_says_so_and_nothing_more(recorder):
    model = network(4, 8, 1)
    optimizer, scaler = sgd(model), make(recorder, model=model, enabled=False)
    for _ in range(3):
        scaler.scale(half(model, torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [e.type for e in recorder.events()] == [
        "loss_dtype",
        "scaler",
        "autocast",
        "backward_order",
        "origin",
    ]
    assert (recorder.data("scaler")[0]["enabled"], recorder.column("attempt")) == (False, [])


def test_watching_in_place_keeps_class_state_and_patches(recorder):
    class Theirs(torch.amp.GradScaler):
        def get_scale(self):
            return -super().get_scale()

    scaler = Theirs("cpu", init_scale=4.0)
    scaler.note = "patched onto the instance"
    assert ampwatch.watch(scaler, recorder=recorder) is scaler
    assert isinstance(scaler, Theirs)
    model = Weighted()
    attempt(scaler, model, sgd(model))
    assert (scaler.get_scale(), scaler.note, recorder.column("scale")) == (
        -4.0,
        "patched onto the instance",
        [4.0],
    )
    assert recorder.data("scaler")[0]["class"] == "Theirs"


def test_watching_twice_is_watching_once(recorder):
    scaler = make(recorder)
    assert ampwatch.watch(ampwatch.watch(scaler)) is scaler
    assert len(recorder.sources) == 1


def test_a_deep_copy_records_as_a_scaler_of_its_own(recorder):
    model = Weighted()
    original = make(recorder)
    attempt(original, model, sgd(model))
    other = Weighted()
    attempt(copy.deepcopy(original), other, sgd(other))
    assert (recorder.column("stream"), len(recorder.data("scaler"))) == ([0, 1], 2)


def test_an_unknown_torch_runs_untouched(recorder):
    class Changed(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, False)

    scaler = Changed("cpu")
    with pytest.warns(
        RuntimeWarning, match="Changed runs without ampwatch, which does not know _unscale_grads_"
    ):
        ampwatch.watch(scaler, recorder=recorder)
    assert type(scaler) is Changed
    assert [e.data["where"] for e in recorder.events("fault")] == ["scaler.open"]


def test_nothing_is_recorded_after_the_end(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    recorder.finished = True
    attempt(scaler, model, optimizer)
    assert recorder.column("attempt") == [0]


def test_a_forked_child_introduces_everything_anew(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    attempt(scaler, model, optimizer)
    recorder.producer = "1" * 32  # as after a fork
    attempt(scaler, model, optimizer)
    assert [len(recorder.data(type)) for type in ("scaler", "optimizers", "tensors")] == [2, 2, 2]
    assert recorder.column("stream") == [0, 0]


def test_inside_a_compiled_function_the_scaler_is_torchs(recorder):
    scaler = make(recorder, init_scale=4.0)
    compiled = torch.compile(lambda loss: scaler.scale(loss) * 2, backend="eager")
    assert compiled(torch.tensor(3.0)).item() == 24.0


def test_hooks_go_with_the_scaler(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    attempt(scaler, model, optimizer)
    assert (len(optimizer._optimizer_step_post_hooks), len(model.w._post_accumulate_grad_hooks)) == (1, 1)
    del scaler
    gc.collect()
    assert (len(optimizer._optimizer_step_post_hooks), len(model.w._post_accumulate_grad_hooks)) == (0, 0)
    assert recorder.column("attempt") == [0]


def test_models_and_optimizers_that_are_watched_can_be_copied(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    attempt(scaler, model, optimizer)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(duplicate.w, model.w)
    assert copy.deepcopy(optimizer).state_dict() == optimizer.state_dict()


def test_a_setting_that_cannot_be_used_is_refused_at_construction():
    with pytest.raises(SettingsError, match="statistics"):
        ampwatch.GradScaler("cpu", settings=Settings(statistics="guessed"))


ENTRIES = [
    "_note_losses", "_announce_step", "_announce_unscale", "_take_gradients", "_before_update", "_after_update", "_send",
    "_close", "_close_step", "_known_scale", "stepped", "accumulated",
]  # fmt: skip


def trained(scaler):
    torch.manual_seed(0)
    model = network(4, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(6):
        optimizer.zero_grad()
        scaler.scale(half(model, torch.full((2, 4), 1e4 if i == 3 else 1.0))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    return [p.tolist() for p in model.parameters()], scaler.state_dict()


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_fault_of_ours_leaves_the_training_torchs(entry, recorder, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def broken(*_args, **_kwargs):
        raise ZeroDivisionError(entry)

    scaler = make(recorder, growth_interval=2)
    vars(scaler)["_ampwatch"].__class__ = type("Broken", (Watch,), {entry: broken})
    assert trained(scaler) == trained(torch.amp.GradScaler("cpu", growth_interval=2))


@pytest.mark.parametrize("method", ["event", "next_attempt", "describe", "attach"])
def test_a_fault_of_the_recorder_leaves_the_training_torchs(method, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    broken = type("Broken", (MemoryRecorder,), {method: lambda *_args, **_kwargs: 1 / 0})
    scaler = make(broken(), growth_interval=2)
    assert trained(scaler) == trained(torch.amp.GradScaler("cpu", growth_interval=2))


class Synchronisations(TorchDispatchMode):
    """Counts what would wait for a device: reading a value, and copies to the host that block."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in (
            "_local_scalar_dense",
            "is_nonzero",
            "nonzero",
            "equal",
            "_unique2",
            "masked_select",
        )
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_that_torch_does_not_read(recorder):
    """Under the mode torch's own method unscales. (The CPU kernel reads its factors from main memory.)"""

    def count(scaler):
        with Synchronisations() as mode:
            trained(scaler)
        return mode.count

    assert count(make(recorder)) == count(torch.amp.GradScaler("cpu"))


def real_memory(size):
    with _disable_current_modes():
        vector = torch.zeros(size, dtype=torch.float64, device="cpu")
        return vector, vector.numpy()


def test_scale_unscale_and_update_never_wait_for_a_cuda_device(recorder):
    """Fake CUDA tensors have no values, so whatever reads one raises."""
    scaler = make(recorder)
    vars(scaler)["_ampwatch"] = Watch(recorder, memory=real_memory)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        parameter = nn.Parameter(torch.ones(70))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(3):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(70)
            scaler.unscale_(optimizer)
            scaler.update()
        with pytest.raises(DataDependentOutputException):
            scaler.get_scale()
    assert len(vars(scaler)["_ampwatch"]._dispatch._ring) == 3


class Fused(torch.optim.SGD):
    """Takes scaled gradients, as a fused optimizer does, and leaves the weights alone."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        assert self.grad_scale is not None


def test_a_fused_optimizer_steps_without_a_wait_for_a_cuda_device(recorder):
    scaler = make(recorder)
    vars(scaler)["_ampwatch"] = watch = Watch(recorder, memory=real_memory)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        parameter = nn.Parameter(torch.ones(70))
        optimizer = Fused([parameter], lr=0.1)
        for _ in range(3):
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(70)
            scaler.step(optimizer)
            scaler.update()
        assert len(watch._dispatch._ring) == 6  # three attempts, and a look at the step of each
        rows = watch._dispatch._flight.rows_of(2)
        assert watch._dispatch._ring.send(rows, None)  # as an autopsy does
