"""Two ranks of a real process group: replicas that drift apart, and a rank that spoils the step of both."""

import subprocess
import sys
from pathlib import Path

import pytest
from loops import above_info, worse_than_info

from ampwatch import spool

WORKER = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from loops import features, half, mlp, recorded
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from contextlib import nullcontext
from pathlib import Path

directory, what, rank = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=2)
model = mlp()
alone = what in ("apart", "alone", "by hand")
net = model if alone else DistributedDataParallel(model)
if what == "reloaded" and rank == 1:  # another checkpoint, after the wrapper had copied the weights
    torch.manual_seed(1)
    model.load_state_dict(mlp().state_dict())
def add_in_float16(_, bucket):
    part = 4 * bucket.buffer().half()  # as of eight ranks, of which four have the same data each
    summed = dist.all_reduce(part, async_op=True).get_future()
    return summed.then(lambda done: bucket.buffer().copy_(done.value()[0].float() / 8))

if what == "compressed":
    net.register_comm_hook(None, add_in_float16)
init_scale = 2.0**16 if what in ("compressed", "high") else 2.0**10
with recorded(directory / "run") as make:
    scaler, optimizer = make(model=model, init_scale=init_scale), torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(25):
        x = features(2 * step + rank)
        if rank == 1 and (what == "apart" and step == 12 or what == "spoiled" and step >= 12):
            x[0, 0] = torch.nan
        keep = 0.0 if what == "empty" and rank == 1 and step >= 12 else 1.0
        optimizer.zero_grad()
        with half(), net.no_sync() if what == "not synchronised" and step >= 7 else nullcontext():
            out = net(x).float()
            loss = F.mse_loss(out, x.nan_to_num().sum(-1, keepdim=True))
        if what == "empty":  # the norm of what a rank has of something
            loss = loss + 1e-3 * (out * keep).square().sum().sqrt()
        scaler.scale(loss).backward()
        if what == "by hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
"""


def two_ranks(directory: Path, what: str) -> Path:
    """Train on two ranks, and return the folder of the records."""
    directory.mkdir(exist_ok=True)
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


def settled(directory: Path) -> float:
    """The loss scale at the end."""
    tables = [batch.table() for batch in spool.read(directory / "loop") if batch.kind == "attempts"]
    return min(float(table["scale_after"][-1]) for table in tables)


def test_a_sum_over_ranks_in_float16_is_a_lower_ceiling(tmp_path):
    """Each rank's part is finite, and their sum is not: the scale comes down to where it is, as to any other ceiling."""
    compressed, high = (two_ranks(tmp_path / what, what) for what in ("compressed", "high"))
    assert (above_info(compressed), above_info(high)) == ([], [])
    assert settled(compressed) < settled(high)


def test_gradients_that_the_wrapper_was_told_not_to_average(tmp_path):
    """no_sync() also around the last micro-batch of a window: neither scale nor skips differ."""
    (finding,) = worse_than_info(two_ranks(tmp_path, "not synchronised"))
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "fatal", 7)
    assert finding.headline.startswith("Ranks 0 and 1 step by different gradients from step 7 on, which")


def test_a_rank_that_loaded_another_checkpoint_after_it_was_wrapped(tmp_path):
    (finding,) = worse_than_info(two_ranks(tmp_path, "reloaded"))
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "fatal", 0)
    assert finding.headline.startswith("Ranks 0 and 1 have different weights, seen at step 0, though")


def test_two_ranks_without_a_wrapper_train_each_by_itself(tmp_path):
    (finding,) = worse_than_info(two_ranks(tmp_path, "alone"))
    assert (finding.kind, finding.severity, finding.first_attempt) == ("rank_disagreement", "warning", 0)
    assert finding.headline.startswith(
        "Ranks 0 and 1 each train the same model by themselves from step 0 on: "
    )


@pytest.mark.parametrize("what", ["together", "by hand"])
def test_two_ranks_that_agree_are_silent(what, tmp_path):
    """Averaged by the wrapper, or without one by the loop itself."""
    assert above_info(two_ranks(tmp_path, what)) == []
