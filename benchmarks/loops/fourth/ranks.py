"""Two processes that train one model over gloo, and sparse gradients under the scaler of sharded models."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampwatch
from loops.lab import Happened, Lab, faulty, half

from .models import Composer, dense, leaves, melodies, settle, sung, turn, weather

PATIENCE = timedelta(seconds=60)


def together(lab: Lab, body: Callable[[int], None], ranks: int = 2) -> None:
    """Run the body as each rank, the first in this process; rank 1 is its child."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    child = ranks > 1 and os.fork() == 0
    rank = int(child)
    try:
        distributed.init_process_group(
            "gloo", f"file://{lab.dir}/ranks", timeout=PATIENCE, rank=rank, world_size=ranks
        )
        torch.manual_seed(4000 + lab.seed)  # all ranks make the same weights
        body(rank)
        distributed.barrier()
    finally:
        if child:
            ampwatch.finish()
            os._exit(0)
        if ranks > 1:
            os.wait()
        distributed.destroy_process_group()


def sharded(lab: Lab, model: nn.Module, **options: Any) -> torch.amp.GradScaler:
    """torch's scaler of sharded models, which adds found_inf over all ranks."""
    lab.models.append(model)
    if lab.plain:
        scaler: torch.amp.GradScaler = ShardedGradScaler("cpu", **options)
    else:
        settings = ampwatch.Settings.load(run=lab.run, dir=lab.dir, quiet=True)
        scaler = ampwatch.ShardedGradScaler("cpu", model=model, settings=settings, **options)
    lab.scalers.append(scaler)
    return scaler


@faulty("rank_disagreement", "fatal", within=1)
def an_expert_on_each_rank(lab: Lab, fault: bool) -> Happened:
    """Each rank has an expert of its own behind a trunk that all share. Gradients of the trunk are averaged; what overflows
    in the expert of rank 1, at step 30, is known there alone: it skips a step that rank 0 takes, and the trunks differ."""

    def train(rank: int) -> None:
        model = nn.ModuleDict({"trunk": dense(10, 24, 24), "expert": nn.Linear(24, 3)})
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        make = lab.scaler if fault else lambda m, **options: sharded(lab, m, **options)
        scaler = make(model, init_scale=2.0**10)
        torch.manual_seed(5000 + 2 * lab.seed + rank)
        for step in lab.steps(70):
            now, then = weather(32)
            with half():
                seen = model["trunk"](now)
                out = model["expert"](seen.detach() if step == 30 else seen).float()
                loss = F.mse_loss(out, (4e3 if step == 30 and rank == 1 else 1.0) * then)
                loss = loss + 1e-3 * seen.float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            for p in model["trunk"].parameters():
                distributed.all_reduce(p.grad)
                p.grad.div_(2)
            lab.note(loss)
            settle(scaler, optimizer)

    together(lab, train)
    return Happened(30)


@faulty("rank_disagreement", "fatal", within=1, accept=("scaler_state_lost",))
def only_the_first_rank_reads_the_checkpoint(lab: Lab, fault: bool) -> Happened:
    """Rank 0 restores weights and scaler; the wrapper hands weights on to rank 1, whose scaler begins at its 2^16 again."""

    def train(rank: int) -> None:
        model = DistributedDataParallel(dense(16, 32, 6))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scaler = lab.scaler(model)
        if rank == 0 or not fault:
            fresh = scaler.state_dict()
            scaler.load_state_dict(fresh | {"scale": 2.0**11, "_growth_tracker": 700})
        torch.manual_seed(5000 + 2 * lab.seed + rank)
        for _ in lab.steps(50):
            x, kind = leaves(32)
            with half():
                loss = F.cross_entropy(model(x).float(), kind)
            turn(lab, scaler, optimizer, loss)

    together(lab, train)
    return Happened(0)


@faulty("rank_fault", "fatal", within=3)
def a_disk_of_one_machine(lab: Lab, fault: bool) -> Happened:
    """From step 25 on the loader of rank 1 reads NaN from a broken disk; averaged, all ranks' gradients are NaN."""

    def train(rank: int) -> None:
        model = DistributedDataParallel(dense(10, 32, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        scaler = lab.scaler(model)
        torch.manual_seed(5000 + 2 * lab.seed + rank)
        for step in lab.steps(50):
            now, then = weather(32)
            if fault and rank == 1 and step >= 25:
                now[::4, 3] = torch.nan
            with half():
                loss = F.mse_loss(model(now).float(), then)
            turn(lab, scaler, optimizer, loss)

    together(lab, train)
    return Happened(25)


class Fading(torch.autograd.Function):
    """A layer whose backward pass is wrong on one device."""

    @staticmethod
    def forward(_: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * torch.inf


@faulty("rank_fault", "fatal", within=3)
def a_backward_pass_of_one_device(lab: Lab, fault: bool) -> Happened:
    """Losses are finite on both ranks; from step 30 on the device of rank 1 answers NaN and inf in backward."""

    def train(rank: int) -> None:
        model = DistributedDataParallel(Composer(24))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = lab.scaler(model)
        torch.manual_seed(5000 + 2 * lab.seed + rank)
        for step in lab.steps(50):
            ill = fault and rank == 1 and step >= 30
            with half():
                loss = sung(
                    lambda notes, ill=ill: Fading.apply(model(notes)) if ill else model(notes), melodies(16)
                )
            turn(lab, scaler, optimizer, loss)

    together(lab, train)
    return Happened(30)


@faulty("sparse_overflow", "warning", within=1, accept=("low_precision_params",))
def one_word_a_thousand_times(lab: Lab, fault: bool) -> Happened:
    """A float16 table with sparse gradients: at step 20 one word fills a batch, and what each adds is finite, their sum is not."""

    def train(_: int) -> None:
        table = nn.Embedding(60, 8, sparse=True, dtype=torch.float16 if fault else torch.float32)
        reads = nn.Linear(8, 8).requires_grad_(False)
        optimizer = torch.optim.SGD(table.parameters(), 1e-4)
        scaler = sharded(lab, table, init_scale=2.0**9)
        for step in lab.steps(60):
            words = torch.full((2048,), 7) if step % 20 == 0 and step else torch.randint(60, (256,))
            with half():
                loss = (reads(table(words)).float() - 1).abs().sum()
            turn(lab, scaler, optimizer, loss)

    together(lab, train, ranks=1)
    return Happened(20)
