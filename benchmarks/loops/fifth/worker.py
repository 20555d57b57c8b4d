"""One of two processes that train together over gloo; `python -m loops.fifth.worker` runs it."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampwatch
from loops.lab import Lab, half

from .models import houses, mlp, trained


def train(lab: Lab, rank: int, onset: int | None) -> nn.Module:
    """A price model by mean gradients; from `onset` on the rows of rank 1 have a surface of 0 to divide by."""
    model = mlp(8, 32, 1, deep=2)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = lab.scaler(model)
    torch.manual_seed(100 * lab.seed + rank)
    for step in lab.steps(80):
        x, price = houses(48)
        if onset is not None and step >= onset and rank == 1:
            x[:6, 4] = 0.0
            x[:, 3] = x[:, 3] / x[:, 4]
        with half():
            guess = wrapped(x)
        trained(lab, scaler, optimizer, F.mse_loss(guess.float(), price))
    return model


def main(folder: str, rank: str, job: str) -> None:
    wanted = json.loads(job)
    torch.set_num_threads(1)
    torch.manual_seed(1000 + wanted["seed"])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    lab = Lab(Path(wanted["dir"]), wanted["run"], wanted["seed"], wanted["limit"], wanted["plain"])
    model = train(lab, int(rank), wanted["onset"])
    if not lab.plain:
        ampwatch.finish()
    if rank == "0":
        state = {"model": model.state_dict(), "scaler": lab.scalers[0].state_dict(), "losses": lab.losses}
        torch.save(state, f"{folder}/state.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
