"""The gradients of an optimizer are listed as they are, whatever changes from one attempt to the next."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampwatch.gradients import GradientList
from ampwatch.internals import Replicas
from ampwatch.registry import Registry

from .lockstep.twin import bits, make


@pytest.fixture
def registry():
    return Registry(lambda *_, **__: None)


def parameters(count, device="cpu"):
    made = [nn.Parameter(torch.zeros(2, device=device)) for _ in range(count)]
    for p in made:
        p.grad = torch.ones_like(p)
    return made


def listing(registry, optimizer, *, may_be_float16=False, **how):
    registry.optimizer(optimizer)
    gradients = GradientList(registry, dict)
    return lambda: gradients.of(optimizer, may_be_float16=may_be_float16, **how)


def test_all_in_torchs_order(registry):
    first, second = parameters(2), parameters(1)
    optimizer = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)
    got = listing(registry, optimizer)()
    assert got.parameters == [*first, *second]
    assert [[g is p.grad for g, p in zip(got.by_device[0], got.parameters, strict=True)]] == [[True] * 3]
    assert got.tensors.tolist() == [0, 1, 2]


def test_what_changes_is_noticed_at_the_next_attempt(registry):
    params = parameters(3)
    optimizer = torch.optim.SGD(params, lr=0.1)
    take = listing(registry, optimizer)
    assert take().tensors.tolist() == [0, 1, 2]
    params[1].grad = None
    assert take().tensors.tolist() == [0, 2]
    params[1].grad = torch.ones(2)
    optimizer.param_groups[0]["params"][2] = parameters(1)[0]  # as where an embedding is made larger
    assert take().tensors.tolist() == [0, 1, 3]
    optimizer.add_param_group({"params": parameters(1)})
    assert take().tensors.tolist() == [0, 1, 3, 4]


def test_rows_are_told_by_device(registry):
    with FakeTensorMode():
        params = [*parameters(1), *parameters(1, "cuda"), *parameters(1)]
        got = listing(registry, torch.optim.SGD(params, lr=0.1))()
    assert [[g.device.type for g in part] for part in got.by_device] == [["cpu", "cpu"], ["cuda"]]
    assert got.tensors.tolist() == [0, 2, 1]


def test_no_gradient_at_all(registry):
    got = listing(registry, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))()
    assert (got.parameters, got.by_device, got.tensors.tolist()) == ([], [], [])


def sparse():
    """An optimizer of a float16 parameter with two gradients of one element."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    weight.grad = torch.sparse_coo_tensor(
        [[1, 1]], [3.0, 4.0], (4,), dtype=torch.float16, check_invariants=True
    )
    return torch.optim.SGD([weight], lr=0.1)


@pytest.mark.parametrize("sharded", [False, True])
def test_sparse_float16_gradients_are_coalesced_where_torch_is_to_do_it(registry, sharded):
    torchs = Replicas(torch.zeros(1), torch.ones(1), sharded=sharded)
    got = listing(registry, sparse(), torchs=torchs, may_be_float16=True)()
    assert (got.by_device[0][0].tolist(), got.sums[0].values.tolist()) == ([7.0], [3.0, 4.0])


def test_others_are_taken_as_they_stand(registry):
    got = listing(registry, sparse(), may_be_float16=True)()
    assert (got.by_device[0][0].tolist(), got.sums) == ([3.0, 4.0], ())


@pytest.mark.parametrize("kind", ["ours", "in place"])
@pytest.mark.parametrize("sharded", [False, True])
def test_they_are_coalesced_as_often_as_by_torch(sharded, kind):
    """It waits for the device. torch's method asks again, which costs nothing where it has been done."""

    def waits(kind):
        optimizer = sparse()
        scaler = make(kind, sharded=sharded)
        scaler.scale(torch.ones(()))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            scaler._unscale_grads_(optimizer, torch.full((1,), 0.5), torch.zeros(1), True)
        grad = optimizer.param_groups[0]["params"][0].grad
        return [e.name for e in profile.events()].count("aten::_coalesce"), bits(grad)

    assert waits(kind) == waits("torch")
    assert waits(kind)[0] == 1


def test_a_removed_parameter_is_let_go(registry):
    params = parameters(2)
    optimizer = torch.optim.SGD(params, lr=0.1)
    take = listing(registry, optimizer)
    take()
    gone = weakref.ref(params.pop())
    del optimizer.param_groups[0]["params"][1]
    take()
    gc.collect()
    assert gone() is None
