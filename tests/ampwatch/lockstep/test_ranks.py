"""Two ranks of a real process group: DDP, FSDP1, FSDP2 and DTensors, bit for bit as with torch's scalers."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import ampwatch

from ..recorded import MemoryRecorder
from .twin import OURS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, by loop."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.ampwatch.lockstep.ranks", str(directory)]
    started = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [pickle.loads((directory / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def test_every_loop_is_torchs(ranks):
    assert [
        (name, rank, kind)
        for rank, seen in enumerate(ranks)
        for name, loop in seen.items()
        for kind in OURS
        if loop[kind] != loop["torch"]
    ] == []


def column(ranks, loop, name):
    return [seen[loop]["columns"][name] for seen in ranks]


SKIPS = {
    "ddp": [[0, 0, 1, 0, 0]] * 2,
    "ddp healthy": [[0] * 5] * 2,
    "ddp local": [[0, 0, 1, 1, 1]] * 2,
    "fsdp1": [[0, 0, 1, 0, 0]] * 2,
    "fsdp1 flat": [[0, 0, 1, 0, 0]] * 2,
    "fsdp1, offloaded": [[0, 0, 1, 1, 1]]
    * 2,  # zero_grad() does not reach a shard that is offloaded: torch adds to it
    "fsdp1 flat, offloaded": [[0, 0, 1, 0, 0]] * 2,
    "fsdp2": [[0, 0, 1, 0, 0]] * 2,
    "fsdp2, tensor parallel": [[0, 1, 0, 0]] * 2,
    "shard, replicate": [[0, 1, 0]] * 2,
    "replicate, shard": [[0, 0, 0], [0, 1, 0]],  # torch asks the first tensor of a list only: the ranks part
    "partial": [[0, 1]] * 2,
    "sharded": [[0, 1, 0, 0]] * 2,
    "sharded, one rank without": [[0, 0, 0, 0]] * 2,
    "sharded, sparse float16": [[0, 1, 0, 0]] * 2,
    "asynchronous": [[0, 1, 0]] * 2,
}


@pytest.mark.parametrize("loop", SKIPS)
def test_which_rank_skips(loop, ranks):
    assert column(ranks, loop, "found_inf") == SKIPS[loop]


@pytest.mark.parametrize("loop", ["fsdp1", "fsdp1, offloaded", "fsdp2"])
def test_statistics_are_of_the_ranks_own_shards(loop, ranks):
    """The small model has 195 parameters; the overflow is the second rank's."""
    numel, n_inf = column(ranks, loop, "numel"), column(ranks, loop, "n_inf")
    assert [sum(each) for each in zip(*numel, strict=True)] == [195] * 5
    assert [bool(each[2]) for each in n_inf] == [False, True]


def test_statistics_are_of_what_torch_checks(ranks):
    assert column(ranks, "sharded, sparse float16", "numel") == [[2] * 4] * 2  # coalesced
    assert column(ranks, "sharded, sparse float16", "n_inf") == [[0] * 4, [0, 1, 0, 0]]
    assert column(ranks, "asynchronous", "n_inf") == [[0, 1, 0]] * 2
    assert column(ranks, "sharded, one rank without", "numel") == [[3] * 4, [0] * 4]


def every_row_of(*attempts):
    """Of the small model's six tensors."""
    return {(attempt, tensor) for attempt in attempts for tensor in range(6)}


@pytest.mark.parametrize(
    ("loop", "attempts"),
    [
        ("ddp healthy", []),
        ("ddp", [0, 1, 2, 3, 4]),  # its own loss is not finite at 2: an autopsy in full
        ("ddp apart", [0, 1, 2, 3]),  # its own gradients at 2: where it began and the worst, next to it
        ("fsdp1", [0, 1, 2, 3, 4]),
    ],
)
def test_of_gradients_that_both_ranks_have_the_second_sends_what_trouble_calls_for(loop, attempts, ranks):
    first, second = (seen[loop]["rows"] for seen in ranks)
    assert {attempt for attempt, _ in second} == set(attempts)
    if loop.startswith("ddp"):
        assert (first, second) == (every_row_of(0, 1, 2, 3, 4), every_row_of(*attempts))
    assert [seen["ddp"]["replicas"] for seen in ranks] == [[], [{"tensors": [0, 1, 2, 3, 4, 5], "first": 0}]]


def test_the_record_of_a_tensor_says_how_it_lies(ranks):
    placed = [seen["replicate, shard"]["placements"] for seen in ranks]
    assert placed == [[["Replicate()"], ["Shard(dim=0)"]]] * 2
    assert [seen["fsdp2"]["placements"] for seen in ranks] == [[["Shard(dim=0)"]] * 6] * 2
    assert ranks[0]["ddp"]["placements"] == [None] * 6


def test_names_are_the_models_own_whatever_wraps_it(ranks):
    own = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert [seen[loop]["names"] for seen in ranks for loop in ("ddp healthy", "fsdp2")] == [own] * 4
    # Of FSDP1's flat parameter a rank lists the originals of which it has a part.
    assert sorted({*ranks[0]["fsdp1"]["names"], *ranks[1]["fsdp1"]["names"]}) == sorted(own)
    assert ranks[0]["fsdp1 flat"]["names"] == ["_flat_param"]


def test_sharded_parameters_are_looked_at_too(ranks):
    assert [seen["fsdp2"]["checked"] for seen in ranks] == [[6], [6]]


def test_after_a_skip_with_a_finite_loss_each_rank_looks_at_its_own_gradients(ranks):
    of_all = list(range(6))
    healthy, faulty = (
        [(sorted(looked), sorted(bad)) for looked, bad in seen["ddp local"]["local"]] for seen in ranks
    )
    assert healthy == [(of_all, [])] * 2
    assert faulty == [(of_all, of_all)] * 2
    assert [bool(seen["ddp"]["local"]) for seen in ranks] == [True, False]  # the second's loss was not finite


def test_the_scaler_tells_its_policy(ranks):
    assert ranks[0]["sharded"]["scaler"] == [("ShardedGradScaler", "torch-sharded-cpu")]
    assert ranks[0]["fsdp2"]["scaler"] == [("GradScaler", "torch")]


def test_arguments_have_torchs_order_and_defaults():
    torchs = list(inspect.signature(ShardedGradScaler).parameters.values())
    ours = list(inspect.signature(ampwatch.ShardedGradScaler).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(torchs)]] == [(p.name, p.default) for p in torchs]
    scaler = ampwatch.ShardedGradScaler("cpu", 8.0, 0.25, 3.0, 5, recorder=MemoryRecorder())
    assert scaler.state_dict() == ShardedGradScaler("cpu", 8.0, 0.25, 3.0, 5).state_dict()


def test_losses_keep_their_dtype_as_with_torchs():
    loss = torch.full((), 2.0, dtype=torch.float16)
    scaler = ampwatch.ShardedGradScaler("cpu", recorder=MemoryRecorder())
    assert scaler.scale(loss).dtype is ShardedGradScaler("cpu").scale(loss).dtype is torch.float16


def test_watched_in_place():
    scaler = ShardedGradScaler("cpu")
    assert ampwatch.watch(scaler, recorder=MemoryRecorder()) is scaler
    assert isinstance(scaler, ShardedGradScaler)
