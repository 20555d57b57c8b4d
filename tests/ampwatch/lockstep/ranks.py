"""Run as one of two ranks: each loop by torch's scaler and by ours. What it saw is left in a file.

python -m tests.ampwatch.lockstep.ranks DIRECTORY RANK
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ..recorded import WORKING
from . import twin
from .twin import OURS, attempt, batches, bits, found_inf, given, loss_of, outcome, small_model

RANK = int(sys.argv[2])
CPU = torch.device("cpu")


def train(scaler, model, forward, spoil):
    """Five steps on batches of this rank's own; `spoil(step, batch)` before the third, `spoil(step, None)` after."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches(10)[RANK::2]):
        optimizer.zero_grad()
        spoil(step, batch)
        scaler.scale(loss_of(forward, batch)).backward()
        spoil(step, None)
        scaler.step(optimizer)
        flags = found_inf(scaler, optimizer)
        scaler.update()
        parameters = list(model.parameters())
        grads = [p.grad for p in parameters]
        state = [value for kept in optimizer.state.values() for value in kept.values()]
        yield flags, *(bits(list(map(part_of, each))) for each in (parameters, grads, state))
        yield bits(scaler.state_dict())


def part_of(value):
    """Of a DTensor this rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def in_input(step, batch):
    if RANK and step == 2 and batch is not None:
        batch[0, 0] = torch.nan


def in_gradient_of(model):
    """One rank's gradient, after it was reduced."""

    def spoil(step, batch):
        if RANK and step == 2 and batch is None:
            grad = next(p.grad for p in model.parameters() if p.grad is not None)
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = torch.inf

    return spoil


def ddp(make):
    model = small_model()
    yield from train(make(model, growth_interval=2), model, DistributedDataParallel(model), in_input)


def ddp_healthy(make):
    """The scaler is given the wrapper, not the model in it."""
    parallel = DistributedDataParallel(small_model())
    yield from train(make(parallel), parallel.module, parallel, lambda step, batch: None)


def empty(step, batch):
    """Of this rank's batch nothing is left."""
    if RANK and step >= 2 and batch is not None:
        batch[0, 0] = 9.0


def ddp_local(make):
    """A finite loss whose gradients are NaN on one rank: the norm of nothing."""
    model = small_model()
    parallel = DistributedDataParallel(model)

    def forward(batch):
        out = parallel(batch)
        return out + (out.float() * (batch[0, 0] != 9.0)).square().sum().sqrt()

    yield from train(make(model, growth_interval=2, init_scale=64.0), model, forward, empty)


def ddp_apart(make):
    model = small_model()
    forward = DistributedDataParallel(model)
    yield from train(make(model, growth_interval=2), model, forward, in_gradient_of(model))


def fsdp1(make):
    model = FullyShardedDataParallel(small_model(), device_id=CPU, use_orig_params=True)
    scaler = make(model, sharded=True, growth_interval=2)
    yield from train(scaler, model, model, in_gradient_of(model))


def fsdp1_flat(make):
    model = FullyShardedDataParallel(small_model(), device_id=CPU)
    yield from train(make(model, sharded=True), model, model, in_input)


@contextmanager
def as_an_accelerator():
    """What torch asks of an accelerator to offload from, and its CPU lacks: pinned memory, streams that are waited for."""
    with (
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        mock.patch.object(torch.cpu.Stream, "synchronize", create=True),
    ):
        yield


def fsdp1_offloaded(make, *, use_orig_params):
    """Shards of parameters and gradients stay on the CPU, in memory that is written over in each backward pass."""
    with as_an_accelerator():
        model = FullyShardedDataParallel(
            small_model(),
            device_id=CPU,
            cpu_offload=CPUOffload(offload_params=True),
            use_orig_params=use_orig_params,
        )
        scaler = make(model, sharded=True, growth_interval=2)
        yield from train(scaler, model, model, in_gradient_of(model))


def fsdp2(make):
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    yield from train(make(model, growth_interval=2), model, model, in_gradient_of(model))


def fsdp2_with_tensor_parallelism(make):
    """Each tensor lies over two dimensions of the mesh, and the second rank's shard of the first overflows."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=1e-2), make(model, init_scale=4.0)
    for step, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if RANK and step == 1:
            model[0].weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        yield bits([p.to_local() for p in model.parameters()]), scaler.get_scale()


def dtensors(make, *placements, plain=False):
    """An optimizer of DTensors that lie thus; on the second rank one shard overflows."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [each])) for each in placements]
    if plain:
        parameters.append(nn.Parameter(torch.ones(3)))
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.1), make(init_scale=4.0)
    for step in range(3):
        grads = [torch.ones_like(p) for p in parameters]
        for grad in grads:
            if RANK and step == 1 and isinstance(grad, DTensor) and grad.placements[0].is_shard():
                grad.to_local()[0, 0] = torch.inf
        given(scaler, parameters, grads)
        scaler.step(optimizer)
        scaler.update()
        yield bits([p.to_local() if isinstance(p, DTensor) else p for p in parameters]), scaler.get_scale()


def partial_gradients(make):
    """Not reduced yet: torch's operation does that."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), make(init_scale=4.0)
    for step in range(2):
        local = torch.full((4,), torch.inf if RANK and step == 1 else 2.0)
        given(scaler, [parameter], [DTensor.from_local(local, mesh, [Partial()])])
        scaler.unscale_(optimizer)
        yield bits(parameter.grad.to_local())
        scaler.update()
        yield scaler.get_scale()


def sharded(make, grad_of):
    """ShardedGradScaler over gradients that are given, which may be None on a rank."""
    parameter = nn.Parameter(
        torch.ones(3, dtype=grad_of(0).dtype if grad_of(0) is not None else torch.float32)
    )
    optimizer, scaler = (
        torch.optim.SGD([parameter], lr=0.1),
        make(sharded=True, growth_interval=2, init_scale=4.0),
    )
    for step in range(4):
        given(scaler, [parameter], [grad_of(step)])
        yield attempt(scaler, [parameter], optimizer)


def overflowing(step):
    return torch.tensor([1.0, torch.inf if RANK and step == 1 else 2.0, 3.0])


def sparse_float16(step):
    """Each value is finite, and their sum is not."""
    values = torch.tensor([6e4 if RANK and step == 1 else 1.0] * 3, dtype=torch.float16)
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), values, (3,), check_invariants=True)


def asynchronous(make):
    """Gradients of a collective that is under way."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), make(init_scale=4.0)
    for step in range(3):
        given(scaler, [parameter], [all_reduce(overflowing(step), "sum", dist.group.WORLD)])
        scaler.unscale_(optimizer)
        yield bits(parameter.grad.clone())
        scaler.step(optimizer)
        scaler.update()
        yield bits(parameter), scaler.get_scale()


LOOPS = {
    "ddp": ddp,
    "ddp healthy": ddp_healthy,
    "ddp local": ddp_local,
    "ddp apart": ddp_apart,
    "fsdp1": fsdp1,
    "fsdp1 flat": fsdp1_flat,
    "fsdp1, offloaded": lambda make: fsdp1_offloaded(make, use_orig_params=True),
    "fsdp1 flat, offloaded": lambda make: fsdp1_offloaded(make, use_orig_params=False),
    "fsdp2": fsdp2,
    "fsdp2, tensor parallel": fsdp2_with_tensor_parallelism,
    "shard, replicate": lambda make: dtensors(make, Shard(0), Replicate()),
    "replicate, shard": lambda make: dtensors(make, Replicate(), Shard(0)),
    "shard and plain": lambda make: dtensors(make, Shard(0), plain=True),
    "partial": partial_gradients,
    "sharded": lambda make: sharded(make, overflowing),
    "sharded, one rank without": lambda make: sharded(make, lambda step: None if RANK else overflowing(step)),
    "sharded, sparse float16": lambda make: sharded(make, sparse_float16),
    "asynchronous": asynchronous,
}


def seen_of(loop):
    """What each kind of scaler makes of a loop, and what ours recorded."""
    seen = {kind: outcome(loop, kind) for kind in ("torch", *OURS)}
    recorder = twin.recorders[-1]
    seen["columns"] = {name: recorder.column(name) for name in ("found_inf", "numel", "n_inf", "n_nan")}
    seen["rows"] = set(zip(recorder.tensors("attempt"), recorder.tensors("tensor"), strict=True))
    seen["replicas"] = recorder.data("replicas")
    seen["placements"] = [t["placements"] for e in recorder.data("tensors") for t in e["tensors"]]
    seen["names"] = [t["name"] for e in recorder.data("tensors") for t in e["tensors"]]
    seen["checked"] = [e["parameters"]["checked"] for e in recorder.data("finite_check")[:1]]
    seen["local"] = [(e["tensors"], e["nonfinite"]) for e in recorder.data("local_gradients")]
    seen["scaler"] = [(s["class"], s["policy"]) for s in recorder.data("scaler")]
    return seen


def main():
    os.environ["AMPWATCH_STRICT"] = "1"
    twin.statistics[:] = WORKING[-1:]
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=RANK, world_size=2)
    seen = {name: seen_of(loop) for name, loop in LOOPS.items()}
    (directory / f"{RANK}.pickle").write_bytes(pickle.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
