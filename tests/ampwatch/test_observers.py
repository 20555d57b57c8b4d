"""Observers on real models under float16 autocast on the CPU."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampwatch.guard import failures
from ampwatch.hooks import gathered, magnitudes, tensors_in
from ampwatch.observers import (
    AutocastProbe,
    BackwardOrder,
    FiniteCheck,
    ForwardSearch,
    LocalGradients,
    OriginProbe,
)
from ampwatch.stats.reference import statistics_of

from .watched import Transformer, backward, forward, mlp, read

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    torch.manual_seed(0)


def numbered(model):
    return list(enumerate(model.parameters()))


ALL = [OriginProbe, BackwardOrder, AutocastProbe, FiniteCheck, ForwardSearch]


def make(kind, model):
    return kind(numbered(model) if kind in (OriginProbe, BackwardOrder) else model)


def hooks_on(model):
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


# what all share


@pytest.mark.parametrize("kind", ALL)
def test_hooks_go_on_once_and_all_come_off(kind):
    model = mlp()
    observer = make(kind, model)
    observer.arm()
    count = hooks_on(model)
    observer.arm()
    assert hooks_on(model) == count
    observer.disarm()
    assert hooks_on(model) == 0


@pytest.mark.parametrize("kind", [OriginProbe, BackwardOrder, AutocastProbe, ForwardSearch])
def test_nothing_seen_is_no_observation(kind):
    observer = make(kind, mlp())
    assert observer.collect() is None
    observer.arm()
    assert observer.collect() is None


@pytest.mark.parametrize("kind", ALL)
def test_training_is_the_same_with_hooks_on(kind):
    plain, watched = mlp(), mlp()
    watched.load_state_dict(plain.state_dict())
    make(kind, watched).arm()
    for model in (plain, watched):
        backward(model, torch.ones(4, 16))
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "save"])
def test_a_copy_of_a_watched_model_is_not_watched(kind, copied):
    model = mlp()
    observer = make(kind, model)
    observer.arm()
    other = saved_and_loaded(model) if copied == "save" else copied(model)
    backward(other, torch.ones(4, 16))
    assert kind is FiniteCheck or observer.collect() is None
    assert hooks_on(other) == 0 or copied is not copy.deepcopy


@pytest.mark.parametrize("kind", ALL)
def test_a_watched_model_is_saved_as_one_that_loads_without_ampwatch(kind):
    model = mlp()
    make(kind, model).arm()
    assert b"ampwatch" not in pickle.dumps(model)


def test_a_deep_copy_can_be_compiled_and_called():
    model = mlp()
    AutocastProbe(model).arm()
    other = copy.deepcopy(model)
    x = torch.ones(4, 16)
    assert torch.equal(torch.compile(other, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("kind", [OriginProbe, LocalGradients])
def test_a_tensor_with_hooks_of_ours_is_sent_to_another_process_without_a_warning(kind):
    weight = torch.ones(4, requires_grad=True)
    kind([(0, weight)]).arm()
    saved = io.BytesIO()
    torch.save(weight, saved)
    ForkingPickler(io.BytesIO()).dump(weight)
    assert torch.equal(torch.load(io.BytesIO(saved.getvalue())), weight)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("kind", ALL)
def test_a_watched_model_can_be_collected(kind):
    model = mlp()
    make(kind, model).arm()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_fault_of_ours_stays_ours(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    model, before = mlp(), failures["observers.ForwardSearch"]
    observer = ForwardSearch(model)
    observer._measure = None  # not callable
    observer.arm()
    assert forward(model, torch.ones(4, 16)).isfinite().all()
    assert failures["observers.ForwardSearch"] == before + 4  # each module on entering


class NothingRead(TorchDispatchMode):
    """Fails where a value or a shape would be read back from the device."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "_unique2", "bincount", "is_nonzero", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.READS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ALL)
def test_nothing_synchronises(kind):
    model = mlp()
    observer = make(kind, model)
    with NothingRead():
        observer.arm()
        backward(model, torch.ones(4, 16))
        observer.disarm()
        observer.collect()
    assert read(observer)


def test_buffers_are_looked_at_without_synchronising():
    model = Transformer(1.0)
    check = FiniteCheck(model)
    with NothingRead():
        check.arm()
        check.collect()
    assert read(check)["buffers"] == {"checked": 0, "nonfinite": [], "count": 0}


def test_magnitudes_carry_inf_and_nan():
    given = [[3.0, -4.0], [1.0, -math.inf], [math.inf, math.nan], [], [3 + 4j]]
    largest = magnitudes([torch.tensor(values) for values in given])
    assert largest.tolist()[:2] == [4.0, math.inf]
    assert math.isnan(largest[2])
    assert largest.tolist()[3:] == [0.0, 4.0]
    assert gathered([]).shape == (0,)


def test_numbers_of_several_devices_are_gathered_where_no_copy_waits():
    with FakeTensorMode():
        on_host, on_gpu = torch.ones((), device="cpu"), torch.ones(2, device="cuda", dtype=torch.float16)
        assert (gathered([on_host, on_gpu]).device.type, gathered([on_host]).device.type) == ("cuda", "cpu")
        assert gathered([on_gpu, on_gpu]).dtype == torch.float64


def test_what_is_empty_lies_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        empty = gathered([]), magnitudes([]), statistics_of([])
    assert {(tensor.device.type, tensor.numel()) for tensor in empty} == {("cpu", 0)}


def test_tensors_are_found_in_nests():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    nested = (
        {"x": [a, 7]},
        nn.ReLU(),
        {"y": (b, torch.ones(1, dtype=torch.int64))},
        torch.ones(1, device="meta"),
        c,
    )
    assert [t.numel() for t in tensors_in(nested)] == [1, 2, 3]


# origin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_gradients_are_born_in_the_dtype_of_autocast(dtype):
    model = mlp()
    probe = OriginProbe(numbered(model))
    probe.arm()
    backward(model, torch.randn(64, 16), dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    origins = read(probe)["origins"]
    assert (origins["0"], origins["4"]) == (name, name)


def test_only_the_first_accumulation_is_looked_at():
    model = mlp()
    probe = OriginProbe(numbered(model))
    probe.arm()
    for _ in range(2):
        backward(model, torch.randn(64, 16))
    assert read(probe)["origins"]["4"] == "float16"
    probe.disarm()
    probe = OriginProbe(numbered(model))
    probe.arm()
    backward(model, torch.randn(64, 16))  # added to what is there: off the grid
    assert read(probe)["origins"]["4"] == "unknown"


@pytest.mark.parametrize(
    ("values", "origin"),
    [
        ([1.0] * 64, "bfloat16"),
        ([1.0] * 63 + [1 + 2**-10], "float16"),
        ([1.0] * 62 + [1 + 2**-10], "unknown"),  # one element short of 64
        ([0.0] + [1.0] * 62 + [1 + 2**-10], "unknown"),
        ([math.inf, math.nan, 0.0] + [1.0] * 63 + [1 + 2**-10], "float16"),
        ([1.0] * 63 + [1 + 2**-11], "unknown"),
        ([2.0**-40] * 64, "bfloat16"),
        ([1.0] * 4, "bfloat16"),
        ([1.0] * 3, "unknown"),
        ([2.0**-15] * 64, "unknown"),  # on both grids, as everything of float16 is below 2^-16
        ([3 * 2.0**-24] * 64, "float16"),  # underflow: bfloat16 would have had bits below 2^-24
        ([3 * 2.0**-24] * 63 + [1.0], "unknown"),
        ([0.0] * 64, "unknown"),
        ([math.nan] * 64, "unknown"),
    ],
)
def test_origin_by_the_grid_of_the_values(values, origin):
    parameter = nn.Parameter(torch.zeros(len(values)))
    probe = OriginProbe([(7, parameter)])
    probe.arm()
    parameter.backward(torch.tensor(values))
    assert read(probe) == {"origins": {"7": origin}}


def test_frozen_parameters_are_left_out():
    model = mlp()
    model[0].requires_grad_(False)
    probe = OriginProbe(numbered(model))
    probe.arm()
    backward(model, torch.randn(64, 16))
    assert sorted(read(probe)["origins"]) == ["2", "3", "4", "5"]


# autocast, backward order


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_read_inside_the_forward_pass(dtype):
    model = mlp()
    probe = AutocastProbe(model)
    probe.arm()
    forward(model, torch.ones(4, 16), dtype=dtype)
    assert read(probe) == {
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "by_hand": False,
        "elsewhere": None,
    }
    forward(model, torch.ones(4, 16), dtype=torch.bfloat16)
    assert read(probe)["dtype"] == str(dtype).removeprefix("torch.")  # once and for all


def test_without_autocast_it_is_float32_and_each_leaf_is_seen_once():
    model = mlp()
    probe = AutocastProbe(model)
    probe.arm()
    model(torch.ones(4, 16))
    assert read(probe) == {"dtype": "float32", "device": "cpu", "by_hand": False, "elsewhere": None}
    assert hooks_on(model) == 0


def test_a_model_that_computes_in_float16_without_autocast_casts_by_hand():
    model = mlp().half()
    probe = AutocastProbe(model)
    probe.arm()
    model(torch.ones(4, 16, dtype=torch.float16))
    assert read(probe) == {"dtype": "float32", "device": "cpu", "by_hand": True, "elsewhere": None}


def test_a_layer_kept_in_float32_does_not_speak_for_the_others():
    model = mlp()
    probe = AutocastProbe(model)
    probe.arm()
    hidden = model[1](model[0](torch.ones(4, 16)))
    forward(model[2], hidden)
    assert read(probe)["dtype"] == "float16"


def test_backward_order_is_that_of_the_backward_pass():
    model = mlp()
    order = BackwardOrder([(10 + i, p) for i, p in numbered(model)])
    order.arm()
    for _ in range(2):
        backward(model, torch.ones(4, 16))
    seen = read(order)["tensors"]
    assert sorted(seen) == [10, 11, 12, 13, 14, 15]
    assert [{*seen[i : i + 2]} for i in (0, 2, 4)] == [{14, 15}, {12, 13}, {10, 11}]


# finite check


def test_a_mask_of_minus_infinity_is_no_fault_and_a_poisoned_weight_is():
    model = Transformer(1.0)
    check = FiniteCheck(model)
    check.arm()
    reach = sum(p.detach().abs().max().item() for p in model.parameters())
    healthy = {"checked": 7, "nonfinite": [], "count": 0, "reach": pytest.approx(reach)}
    masked = {"checked": 0, "nonfinite": [], "count": 0}
    assert read(check) == {"parameters": healthy, "buffers": masked}
    model.blocks[0].key.bias.data[3] = math.nan
    check.arm()  # the first look stands
    poisoned = {"checked": 7, "nonfinite": ["blocks.0.key.bias"], "count": 1, "reach": None}
    assert read(check) == {"parameters": poisoned, "buffers": masked}


def test_a_mask_that_a_model_makes_late_is_no_fault():
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(4, 4))
    model.register_buffer("cache", torch.empty(0))
    check = FiniteCheck(model)
    check.arm()
    model.mask.fill_(-math.inf).triu_(1)
    model.cache = torch.full((2, 2), math.inf)  # new, so this is what it is at first
    assert read(check)["buffers"] == {"checked": 1, "nonfinite": [], "count": 0}
    model.mask[0, 0] = math.nan
    assert read(check)["buffers"] == {"checked": 1, "nonfinite": ["mask"], "count": 1}


def test_a_model_that_is_converted_after_the_first_look_is_still_known():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    check = FiniteCheck(model)
    check.arm()
    model.to(torch.float64)
    model[1].running_var[2] = math.inf
    assert read(check)["buffers"] == {"checked": 2, "nonfinite": ["1.running_var"], "count": 1}


def test_batch_norm_statistics_are_poisoned_by_an_overflow():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    check = FiniteCheck(model)
    check.arm()
    forward(model, torch.full((4, 16), 6e4) * model[0].weight.sign()[0])
    buffers = {"checked": 2, "nonfinite": ["1.running_mean", "1.running_var"], "count": 2}
    assert read(check)["buffers"] == buffers


def test_at_most_sixteen_names_are_given():
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(20))
    check = FiniteCheck(model)
    check.arm()
    for parameter in model:
        parameter.data.fill_(math.inf)
    seen = read(check)["parameters"]
    assert (seen["checked"], len(seen["nonfinite"]), seen["count"]) == (20, 16, 20)


# gradients of this rank's own


def contributions(*grads):
    """What is told after one backward pass for each of these gradients of two parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    observer = LocalGradients(list(enumerate(parameters)))
    observer.arm()
    for each in grads:
        sum((p * torch.tensor(g)).sum() for p, g in zip(parameters, each, strict=True)).backward()
    observer.disarm()
    assert not any(p._backward_hooks for p in parameters)
    return read(observer)


def test_local_gradients_are_looked_at_in_each_pass():
    finite, bad = ([1.0, 2.0], [3.0, 4.0]), ([1.0, math.nan], [1.0, 1.0])
    assert contributions(finite, finite)["nonfinite"] == []
    assert contributions(bad, finite)["nonfinite"] == contributions(finite, bad)["nonfinite"] == [0]
    assert sorted(contributions(finite)["tensors"]) == [0, 1]


def test_no_local_gradients_without_a_backward_pass():
    assert LocalGradients([(0, torch.nn.Parameter(torch.zeros(2)))]).collect() is None
