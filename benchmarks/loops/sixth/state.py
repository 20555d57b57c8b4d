"""The scaler, its state and what goes with it, and a second process."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from loops.lab import Happened, Lab, faulty, half

from .zoo import Chain, Clips, Faces, Letters, advance, portraits, spectrograms, spelled


class Wrapped(nn.Module):
    """A model that opens autocast in its own forward."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.inner(x).float()


@faulty("useless_scaler", "warning", within=1)
def moved_to_bfloat16_in_the_model(lab: Lab, fault: bool) -> Happened:
    """The model was moved to bfloat16 where it opens autocast, three files from the loop, which still scales."""
    model = Wrapped(Clips(), torch.bfloat16 if fault else torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = lab.scaler(model)
    for _ in lab.steps(80):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _part in range(2):
            x = spectrograms(4)
            loss = F.mse_loss(model(x), x) / 2
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        lab.note(total)
    return Happened(0)


@faulty("scaler_state_lost", "warning", within=1)
def each_fold_begins_with_the_first_state(lab: Lab, fault: bool) -> Happened:
    """At the end of each epoch the trainer loads the state that it saved before training, of the scaler alone."""
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(model, init_scale=2.0**21)
    fresh = copy.deepcopy(scaler.state_dict())
    for step in lab.steps(120):
        if fault and step and step % 30 == 0:
            scaler.load_state_dict(copy.deepcopy(fresh))
        advance(lab, scaler, optimizer, spelled(model))
    return Happened(30)


@faulty("schedule_ahead", "warning")
def one_cycle_through_the_descent(lab: Lab, fault: bool) -> Happened:
    """A scale that begins at 2^40, and a warm-up of twelve steps that is stepped with every batch: it ends before training begins."""
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 13))
    scaler = lab.scaler(model, init_scale=2.0**40)
    for _ in lab.steps(120):
        tokens = torch.randint(30, (16, 6))
        with half():
            tags = model(tokens)
        loss = F.cross_entropy(tags.float().flatten(0, 1), (tokens % 4).flatten())
        loss = loss + 1e-3 * model.moves.square().sum()
        if advance(lab, scaler, optimizer, loss) or fault:
            warm.step()
    return Happened()


def both(lab: Lab, rank: int, onset: int, fault: bool) -> None:
    """What one of two ranks trains; gradients are averaged by DistributedDataParallel."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{lab.dir / 'rendezvous'}", rank=rank, world_size=2)
    torch.manual_seed(77 + lab.seed)
    model = nn.Sequential(Faces(), nn.ReLU(), nn.Linear(16, 5))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = lab.scaler(wrapped)
    torch.manual_seed(1000 * (rank + 1) + lab.seed)
    for step in lab.steps(onset + 30):
        labels = torch.randint(5, (12,))
        x = portraits(labels)
        if fault and rank == 1 and step >= onset:
            x[step % 12, 0, 4] = torch.nan
        with half():
            logits = wrapped(x)
        advance(lab, scaler, optimizer, F.cross_entropy(logits.float(), labels))


@faulty("rank_fault", "fatal", within=3)
def the_shard_of_the_second_rank_is_damaged(lab: Lab, fault: bool) -> Happened:
    """Two ranks under DistributedDataParallel; from a file on each batch of the second has a picture with a row of NaN."""
    onset = 30 + lab.seed % 6
    child = os.fork()
    if not child:
        status: Any = 1
        try:
            both(lab, 1, onset, fault)
            lab.restart()
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    both(lab, 0, onset, fault)
    lab.restart()
    dist.destroy_process_group()
    _, code = os.waitpid(child, 0)
    if code:
        raise RuntimeError(f"the second rank ended with status {code}")
    return Happened(onset)
