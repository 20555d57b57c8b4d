"""What an attempt's rows and events say, on real loops."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from ampwatch.records import is_missing
from ampwatch.settings import Settings

from ..recorded import scaler as make
from .loops import Weighted, attempt, half, network, sgd


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_changed_in_place_afterwards_is_kept_as_it_was(dtype, recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    loss = model(torch.tensor([3.0, 0.0])).to(dtype, copy=True)
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


def epochs(recorder, begin, *, n=3):
    """Epochs of three attempts with one optimizer, the second of them skipped; `begin` answers the epoch's scaler."""
    model = Weighted()
    optimizer = sgd(model)
    for epoch in range(n):
        scaler = begin(epoch)
        for x in (1.0, math.inf, 1.0):
            attempt(scaler, model, optimizer, (x, 0.0))
        del scaler


def test_a_scaler_made_anew_goes_on_with_the_steps(recorder):
    epochs(recorder, lambda _: make(recorder))
    assert recorder.column("step") == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert [e.step for e in recorder.events("scaler")] == [0, 2, 4]
    assert [e.step for e in recorder.events("skip")] == [1, 3, 5]


def test_it_does_where_the_one_before_is_gone_and_harvested_to_its_end(recorder):
    def begin(epoch):
        gc.collect()
        assert recorder.column("step") == [0, 1, 1, 2, 3, 3][: 3 * epoch]
        harvesters = [weakref.ref(source) for source in recorder.sources]
        recorder.sources.clear()
        assert [harvester() for harvester in harvesters] == [None] * len(harvesters)
        return make(recorder)

    epochs(recorder, begin)
    assert recorder.column("step") == [0, 1, 1, 2, 3, 3, 4, 5, 5]


def test_a_scaler_made_anew_goes_on_from_the_users_own_step(recorder):
    def begin(epoch):
        if epoch == 0:
            recorder.logbook.add("step", 1000)
        return make(recorder)

    epochs(recorder, begin)
    assert recorder.column("step") == [1000, 1001, 1001, 1002, 1003, 1003, 1004, 1005, 1005]


def test_what_the_user_counts_himself_stays_his(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    for step in range(6):
        recorder.logbook.add("step", 10 * step)
        attempt(scaler, model, optimizer)
        scaler = make(recorder) if step % 2 else scaler
    assert recorder.column("step") == [0, 10, 20, 30, 40, 50]


def test_two_optimizers_of_a_scaler_made_anew(recorder):
    networks = [(model, sgd(model)) for model in (Weighted(), Weighted())]
    for _ in range(2):
        scaler = make(recorder)
        for model, optimizer in networks * 2:
            attempt(scaler, model, optimizer)
    assert recorder.column("step") == list(range(8))


def test_scalers_of_different_optimizers_count_each_for_themselves(recorder):
    trained = [(make(recorder), model, sgd(model)) for model in (Weighted(), Weighted())]
    for _ in range(3):
        for each in trained:
            attempt(*each)
    assert recorder.column("step") == [0, 0, 1, 1, 2, 2]


def test_a_scaler_that_comes_back_counts_no_step_twice(recorder):
    scalers = [make(recorder), make(recorder)]
    epochs(recorder, lambda epoch: scalers[epoch % 2], n=4)
    assert recorder.column("step") == [0, 1, 1, 2, 3, 3, 2, 3, 3, 4, 5, 5]


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


def test_tensors_are_recorded_densely_then_every_so_often(recorder):
    recorder.settings = Settings(tensor_every=25)
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, growth_interval=1000)
    for i in range(120):
        attempt(scaler, model, optimizer, x=(math.inf if i in (70, 71) else 1.0, 0.0))
    assert sorted(recorder.tensors("attempt")) == [*range(76), 100]  # with what was around 70


def test_updates_of_an_iteration(recorder):
    """Three of the critic's and one of the generator's, then both by one update, then micro-batches."""
    critic, generator = Weighted(), Weighted()
    optimizers, scaler = [sgd(critic), sgd(generator)], make(recorder)
    for _ in range(2):
        for _ in range(3):
            attempt(scaler, critic, optimizers[0])
        attempt(scaler, generator, optimizers[1])
    for _ in range(2):
        scaler.scale(critic(torch.ones(2)) + generator(torch.ones(2))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    for _ in range(2):
        for _ in range(4):
            scaler.scale(critic(torch.ones(2))).backward()
        scaler.step(optimizers[0])
        scaler.update()
    assert recorder.column("updates") == [-1, 1, 1, -1, 2, 1, 1, 4, -1, 1, 4, 1]
    assert recorder.column("losses")[-1] == recorder.column("micro_batches")[-1] == 4


def test_a_gan_that_updates_for_each_has_two_updates_an_iteration(recorder):
    models = [Weighted(), Weighted()]
    optimizers, scaler = [sgd(m) for m in models], make(recorder)
    for i in (0, 1, 0, 1, 0, 1):
        attempt(scaler, models[i], optimizers[i])
    assert recorder.column("updates") == [-1, -1, 2, 2, 2, 2]


@pytest.mark.parametrize("losses", [(2.0,), (2.0, 4.0)])
def test_the_losses_of_a_functionalized_function_are_read(recorder, losses):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    torch.func.functionalize(lambda w: sum(scaler.scale((w * x).mean()) for x in losses))(model.w).backward()
    scaler.step(optimizer)
    scaler.update()
    assert recorder.column("loss") == [sum(losses) / len(losses)]


def test_the_loss_of_a_mapped_function_is_its_mean(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    torch.func.vmap(torch.func.grad(lambda x: scaler.scale(x * x)))(torch.tensor([1.0, 3.0]))
    model(torch.ones(2)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert recorder.column("loss") == [5.0]
