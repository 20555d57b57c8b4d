"""Two ranks of a real process group: replicas that drift apart, and a rank that spoils the step of both."""

import subprocess
import sys
from pathlib import Path

from loops import above_info, worse_than_info

WORKER = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from loops import features, half, mlp, recorded
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from pathlib import Path

directory, what, rank = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=2)
model = mlp()
net = model if what == "apart" else DistributedDataParallel(model)
with recorded(directory / "run") as make:
    scaler, optimizer = make(model=model, init_scale=2.0**10), torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(25):
        x = features(2 * step + rank)
        if rank == 1 and (what == "apart" and step == 12 or what == "spoiled" and step >= 12):
            x[0, 0] = torch.nan
        keep = 0.0 if what == "empty" and rank == 1 and step >= 12 else 1.0
        optimizer.zero_grad()
        with half():
            out = net(x).float()
            loss = F.mse_loss(out, x.nan_to_num().sum(-1, keepdim=True))
        if what == "empty":  # the norm of what a rank has of something
            loss = loss + 1e-3 * (out * keep).square().sum().sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
"""


def two_ranks(directory: Path, what: str) -> Path:
    """Train on two ranks, and return the folder of the records."""
    command = [
        sys.executable,
        "-W",
        "error::UserWarning:__main__",
        "-c",
        WORKER,
        str(Path(__file__).parent),
        str(directory),
    ]
    ranks = [
        subprocess.Popen([*command, what, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    return directory / "run"


def test_replicas_that_nothing_keeps_together_drift_apart(tmp_path):
    (finding,) = worse_than_info(two_ranks(tmp_path, "apart"))
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "fatal", 12)


def test_data_of_one_rank_that_spoils_every_step(tmp_path):
    (finding,) = worse_than_info(two_ranks(tmp_path, "spoiled"))
    assert (finding.kind, finding.severity, finding.rank, finding.first_attempt) == (
        "rank_fault",
        "fatal",
        1,
        12,
    )


def test_a_rank_whose_loss_is_finite_and_whose_gradients_are_not(tmp_path):
    (finding,) = worse_than_info(two_ranks(tmp_path, "empty"))
    assert (finding.kind, finding.severity, finding.rank, finding.first_attempt) == (
        "rank_fault",
        "fatal",
        1,
        13,
    )
    assert finding.evidence[0].text.startswith("12 attempts in which the gradients of rank 1")


def test_two_ranks_that_agree_are_silent(tmp_path):
    assert above_info(two_ranks(tmp_path, "together")) == []
