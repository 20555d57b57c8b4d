import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampwatch import identity
from ampwatch.records import RUN_ID
from ampwatch.settings import Settings

ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}\Z")


def run_id(environ=None, world_size=8, **given):
    return identity.run_id(Settings(**given), world_size, environ or {})


def test_a_producer_is_128_random_bits():
    assert re.fullmatch(r"[0-9a-f]{32}", identity.new_producer())
    assert identity.new_producer() != identity.new_producer()


def test_one_process_draws_a_run_of_its_own():
    environ = {"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "job"}
    assert ULID.match(run_id(environ, world_size=1))
    assert run_id(world_size=1) != run_id(world_size=1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "job 7/a"}, "job-7-a"),
        ({"SLURM_JOB_ID": "77"}, "77"),
        (
            {
                "TORCHELASTIC_RUN_ID": "none",
                "SLURM_CLUSTER_NAME": "c",
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "0",
                "SLURM_RESTART_COUNT": "1",
            },
            "c-77-0-1",
        ),
    ],
)
def test_several_ranks_find_the_same_run(environ, expected):
    assert run_id(environ) == expected
    assert RUN_ID.match(expected)


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "--"}])
def test_ranks_that_can_agree_on_nothing_record_runs_of_their_own(environ):
    assert ULID.match(run_id(environ))


def test_the_run_that_was_set_wins():
    assert run_id({"TORCHELASTIC_RUN_ID": "job"}, run="mine") == "mine"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)), ({"RANK": "x", "WORLD_SIZE": "8"}, (0, 1))],
)
def test_rank_and_world_are_read_from_the_environment(environ, expected):
    assert identity.rank_and_world(environ) == expected


RANK = """
import sys
import torch.distributed as dist
from ampwatch import identity
from ampwatch.settings import Settings

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
runs = [identity.run_id(Settings(), identity.rank_and_world({})[1]) for _ in range(2)]
print(*identity.rank_and_world({}), *runs)
dist.barrier()
dist.destroy_process_group()
"""


def test_rank_0_shares_each_run_it_draws(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=60)[0].split() for rank in ranks)
    assert (first[:2], second[:2]) == (["0", "2"], ["1", "2"])
    assert first[2:] == second[2:]
    assert len(set(first[2:])) == 2
    assert all(map(ULID.match, first[2:]))


def test_the_description_holds_any_configuration():
    config = {"lr": 0.1, "out": Path("/x"), "args": argparse.Namespace(a=1), 3: [1, (2, None)]}
    described = identity.description(Settings(config=config, tags=("t",), name="n"), world_size=2)
    assert described["config"] == {"lr": 0.1, "out": "/x", "args": "Namespace(a=1)", "3": [1, [2, None]]}
    assert (described["tags"], described["name"], described["world_size"]) == (["t"], "n", 2)
    assert described["pid"] == os.getpid()
    assert described["versions"]["ampwatch"] == "0.1.0"


def test_a_configuration_that_no_record_can_hold_is_left_out(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    assert identity.description(Settings(config={"n": 2**70}), world_size=1)["config"] == {}
