"""Every example runs as it stands, on a machine without a GPU, and what it recorded is what it did."""

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from ampwatch import spool

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYERS = ["0.weight", "0.bias", "2.weight", "2.bias"]
EXPECTED = {  # attempts, skips at least (what overflows depends on the processor), the first tensors
    "quick_start": (100, 0, LAYERS),
    "with_accelerate": (50, 8, LAYERS),
    "with_transformers": (30, 0, ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]),
    "with_lightning": (50, 8, [f"net.{name}" for name in LAYERS]),
}


COUNTED = ("with_transformers", "with_lightning")  # by the framework's own steps, skipped ones too


def taken_before(skips):
    return [0, *accumulate(1 - skip for skip in skips)][:-1]


def run(example, folder):
    environ = {**os.environ, "AMPWATCH_DIR": str(folder / "runs"), "AMPWATCH_STRICT": "1"}
    command = [sys.executable, EXAMPLES / f"{example}.py"]
    return subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True).stderr


def recorded(folder):
    """Skips and steps of the attempts in order, and the names of the tensors."""
    (run_folder,) = (folder / "runs").iterdir()
    batches = list(spool.read(run_folder))
    tables = [b.table() for b in batches if b.kind == "attempts"]
    skips, steps = ([v for table in tables for v in table[name].tolist()] for name in ("skipped", "step"))
    events = [e for b in batches if b.kind == "events" for e in b.events()]
    names = [t["name"] for e in events if e.type == "tensors" for t in e.data["tensors"]]
    return skips, steps, names


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("example", EXPECTED)
def test_an_example_is_short_and_records_what_it_did(example, tmp_path):
    pytest.importorskip(example.partition("with_")[2] or "torch")
    attempts, least, tensors = EXPECTED[example]
    said = run(example, tmp_path)
    skips, steps, names = recorded(tmp_path)
    skipped = sum(skips)
    assert (len(skips), set(skips) <= {0, 1}, skipped >= least) == (attempts, True, True)
    assert steps == (list(range(attempts)) if example in COUNTED else taken_before(skips))
    assert names[: len(tensors)] == tensors
    assert f"ampwatch: healthy: {attempts - skipped} steps taken, {skipped} skipped" in said
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < 40
