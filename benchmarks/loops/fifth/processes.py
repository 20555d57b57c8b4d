"""Two processes that train together."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from loops.lab import Happened, Lab, TracedScaler, faulty

from .models import mlp


@faulty("rank_fault", "fatal", within=3)
def a_division_on_one_of_two(lab: Lab, fault: bool) -> Happened:
    """DDP over two processes; from a step on the shard of the second holds rows whose price per surface is a division by 0."""
    onset = 34 + lab.seed % 8
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = json.dumps(
            {
                "dir": str(lab.dir),
                "run": lab.run,
                "seed": lab.seed,
                "limit": lab.limit,
                "plain": lab.plain,
                "onset": onset if fault else None,
            }
        )
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "loops.fifth.worker", folder, str(rank), job],
                env={**os.environ, "PYTHONPATH": path},
            )
            for rank in range(2)
        ]
        if any(rank.wait() for rank in ranks):
            raise RuntimeError("a process of two has failed; what it said is on stderr")
        state = torch.load(f"{folder}/state.pt")
    model, scaler = mlp(8, 32, 1, deep=2), TracedScaler("cpu")
    model.load_state_dict(state["model"])
    scaler.load_state_dict(state["scaler"])
    lab.models.append(model)
    lab.scalers.append(scaler)
    lab.losses += state["losses"]
    return Happened(onset)
