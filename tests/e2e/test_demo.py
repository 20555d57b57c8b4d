"""The main job: three runs, three verdicts, from the records alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ampwatch
from ampwatch.demo.train import Plan, train
from ampwatch.settings import Settings

STEPS = 160
SEED = 3


def command(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "ampwatch", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("demo"))
    return command("demo", "--exit", "--steps", str(STEPS), "--seed", str(SEED), "--dir", folder)


def test_each_run_gets_the_right_verdict(demo):
    verdicts = [run["verdict"] for run in demo["runs"]]
    assert [v["kind"] for v in verdicts] == [None, "forward_overflow", "underflow"]
    assert [v["word"] for v in verdicts] == ["healthy", "failing", "warning"]


def test_the_overflow_is_named_with_its_step_and_module(demo):
    verdict = demo["runs"][1]["verdict"]
    assert (verdict["first_step"], verdict["module"]) == (demo["overflow_at"], "blocks.1.attention")
    assert f"step {demo['overflow_at']}" in verdict["sentence"]


def test_the_underflow_is_named_with_its_step_and_layer(demo):
    verdict = demo["runs"][2]["verdict"]
    assert verdict["first_step"] == 0
    assert verdict["tensor"].startswith(verdict["module"] + ".")


def test_a_healthy_run_has_nothing_above_info(demo):
    assert {f["severity"] for f in demo["runs"][0]["findings"]} <= {"info"}


def test_the_records_alone_give_the_same_verdicts_in_a_fresh_process(demo):
    again = command("diagnose", str(Path(demo["dir"], "runs")))
    found = {run["run"]: (run["verdict"], run["findings"]) for run in again["runs"]}
    assert found == {run["run"]: (run["verdict"], unmarked(run["findings"])) for run in demo["runs"]}


def unmarked(findings):
    """The findings without what people say of them on a server."""
    marks = ("mark", "marked_by", "marked_at")
    return [{name: value for name, value in one.items() if name not in marks} for one in findings]


@pytest.mark.parametrize("name", ["overflow", "underflow"])
def test_the_same_run_without_its_fault_is_healthy(name, tmp_path):
    train(Plan(name, STEPS, SEED), settings=Settings.load(run=name, dir=tmp_path, quiet=True))
    ampwatch.finish()
    assert [f for f in ampwatch.diagnose(tmp_path) if f.severity != "info"] == []


def test_the_step_is_the_loops_own_also_after_skips(tmp_path):
    plan = Plan("x", 60, SEED, overflow_at=40, init_scale=2.0**24)
    train(plan, settings=Settings.load(run="x", dir=tmp_path, quiet=True))
    ampwatch.finish()
    found = ampwatch.diagnose(tmp_path)
    assert [(one.kind, one.first_step, one.first_attempt) for one in found] == [("forward_overflow", 40, 40)]
    assert [(link.kind, link.step) for link in found[0].chain] == [
        ("calibration", 0),
        ("forward_overflow", 40),
    ]
