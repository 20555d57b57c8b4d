"""Parameters and gradients of every kind, and optimizers whose parameters come and go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ampwatch.guard import failures

from .twin import assert_lockstep, attempt, batches, bits, given, loss_of, small_model

pytestmark = pytest.mark.usefixtures("each_pass")


class Wrapper(torch.Tensor):
    """A gradient that is more than a tensor."""


def sparse(values, *, dtype=torch.float32):
    indices = torch.tensor([[0, 0, 2]])
    return torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (3,), check_invariants=True)


def pair():
    return torch.tensor([1 + 2j, 3 - 4j, 5j])


GRADIENTS = {
    "plain": lambda: torch.ones(3),
    "empty": lambda: torch.ones(0),
    "scalar": lambda: torch.tensor(2.0),
    "expanded": lambda: torch.ones(()).expand(3),
    "with gaps": lambda: torch.arange(6.0)[::2],
    "flipped view": lambda: torch.arange(6.0).view(2, 3).t(),
    "misaligned": lambda: torch.arange(4.0)[1:],
    "channels last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "complex": pair,
    "conj": lambda: pair().conj(),
    "neg": lambda: pair().conj().imag,
    "contiguous neg": lambda: torch._neg_view(torch.arange(3.0)),
    "one element neg": lambda: torch._neg_view(torch.ones(1)),
    "real part": lambda: pair().real,
    "collective under way": lambda: AsyncCollectiveTensor(torch.tensor([1.0, 2.0, 3.0])),
    "subclass": lambda: torch.ones(3).as_subclass(Wrapper),
    "sparse": lambda: sparse([1.0, 2.0, 3.0]),
    "sparse inf": lambda: sparse([1.0, torch.inf, 3.0]),
    "sparse float16": lambda: sparse([6e4, 6e4, 1.0], dtype=torch.float16),
    "coalesced": lambda: sparse([1.0, 2.0, 3.0]).coalesce(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(3, device="meta"),
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "zero tensor": lambda: torch._efficientzerotensor(3),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_every_kind(name):
    """Beside a usual one: the same of both, or the same refusal."""

    def loop(make):
        usual, odd, scaler = nn.Parameter(torch.ones(3)), GRADIENTS[name](), make(init_scale=4.0)
        parameters = [usual, odd.detach().clone()]
        optimizer = torch.optim.SGD([usual], lr=0.5)
        optimizer.param_groups[0]["params"].append(parameters[1])
        for _ in range(2):
            given(scaler, parameters, [torch.ones(3), GRADIENTS[name]()])
            try:
                scaler.unscale_(optimizer)
            finally:
                yield bits(parameters[0].grad), bits(parameters[1].grad)
            scaler.update()
            yield scaler.state_dict()

    assert_lockstep(loop)


@pytest.mark.parametrize("kind", ["quantized", "strided", "jagged"])
def test_what_torchs_operation_does_not_know(kind):
    """Quantized and nested gradients: the same refusal."""

    def loop(make):
        usual, scaler = nn.Parameter(torch.ones(3)), make()
        if kind == "quantized":
            odd = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
            odd.grad = odd.clone()
        else:
            parts = [torch.ones(2, 3), torch.ones(3, 3)]
            odd = torch.nested.nested_tensor(parts, layout=getattr(torch, kind), requires_grad=True)
            torch.nested.to_padded_tensor(odd, 0.0).sum().backward()
        optimizer = torch.optim.SGD([usual], lr=0.5)
        optimizer.param_groups[0]["params"].append(odd)
        given(scaler, [usual], [torch.ones(3)])
        yield attempt(scaler, [usual], optimizer)

    assert_lockstep(loop)


def test_parameters_on_several_devices():
    """The second device is meta, for want of another: torch refuses it, and has unscaled the first."""

    def loop(make):
        parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))]
        optimizer, scaler = torch.optim.SGD(parameters, lr=0.1), make()
        given(scaler, parameters, [torch.ones(3), torch.ones(3, device="meta")])
        try:
            scaler.unscale_(optimizer)
        finally:
            yield parameters[0].grad.tolist()

    assert_lockstep(loop)


def test_none_gradients_empty_groups_and_groups_added_later():
    def loop(make):
        model, unused = small_model(), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": []}])
        scaler = make(model, growth_interval=2)
        for step, batch in enumerate(batches(5)):
            if step == 2:
                optimizer.add_param_group({"params": [*model[3].parameters(), unused], "lr": 0.1})
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            yield attempt(scaler, [*model.parameters(), unused], optimizer)

    assert_lockstep(loop)


def test_freezing_and_unfreezing():
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), make(model)
        for step, batch in enumerate(batches(6)):
            model[0].requires_grad_(step not in (0, 1, 4))
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def test_an_optimizer_without_any_gradient():
    def loop(make):
        scaler = make()
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        yield scaler.state_dict()

    assert_lockstep(loop)


def test_one_parameter_in_two_optimizers():
    """torch unscales it twice."""

    def loop(make):
        model = small_model()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        scaler = make(model)
        for batch in batches(3):
            model.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            yield attempt(scaler, model.parameters(), *optimizers)

    assert_lockstep(loop)


def test_one_parameter_twice_in_one_optimizer():
    def loop(make):
        parameter = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), make()
        optimizer.param_groups[0]["params"].append(parameter)
        given(scaler, [parameter], [torch.full((3,), 2.0**16)])
        yield attempt(scaler, [parameter], optimizer)

    assert_lockstep(loop)


def test_parameters_that_are_no_tensors(monkeypatch):
    """Ours fails before torch does, and keeps it to itself."""
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def loop(make):
        optimizer, scaler = torch.optim.SGD([nn.Parameter(torch.ones(1))]), make()
        optimizer.param_groups[0]["params"].append("a name")
        scaler.scale(torch.ones(()))
        yield scaler.unscale_(optimizer)

    assert_lockstep(loop, fails=["scaler.unscale_", "scaler.gradients"])
    failures.clear()


def test_a_model_of_meta_tensors():
    def loop(make):
        with torch.device("meta"):
            model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model)
        scaler.scale(model(torch.ones(2, 6, device="meta")).sum()).backward()
        yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def test_parameters_that_get_their_shape_in_the_first_pass():
    """And some that never get one."""

    def loop(make):
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
        every = nn.ModuleList([model, nn.LazyLinear(3)])
        optimizer, scaler = torch.optim.AdamW(every.parameters()), make(every, growth_interval=2)
        for batch in batches(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)
