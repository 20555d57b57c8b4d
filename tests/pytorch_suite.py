"""PyTorch's own tests of GradScaler, as they are, once with torch's scalers and once each with ours in their place.

    python tests/pytorch_suite.py PATH_TO_PYTORCH [FILE ...]

PATH_TO_PYTORCH is a source tree of PyTorch, best of the release that is installed; its tests need `expecttest`. From
every file under test/ that names GradScaler (or from these FILEs) the tests run that come to name it. A test passes
here if it ends with ours as it ends with torch's; the exit status is 1 if one does not.

Where there is no GPU most of these tests are skipped by PyTorch. Those of ShardedGradScaler ask for one and use none:
they are told that there is one.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

KIND, OUTCOMES = "AMPWATCH_SUITE_KIND", "AMPWATCH_SUITE_OUTCOMES"
KINDS = ("torch", "ours", "in place")
NAMED = re.compile(r"GradScaler|grad_scal(er|ing)|_amp_foreach_non_finite|_amp_update_scale")
ASKS_IN_VAIN = "test_fsdp_sharded_grad_scaler"
Outcomes = dict[str, list[Any]]

made: Counter[str] = Counter()


def main(tree: Path, files: list[str]) -> int:
    """Run each kind, compare, and print what was found."""
    tests = [tree / file for file in files] or sorted((tree / "test").rglob("test_*.py"))
    seen = {kind: Counter[str]() for kind in KINDS}
    different = 0
    for test in tests:
        if not NAMED.search(test.read_text(errors="ignore")):
            continue
        by_kind = {kind: run(tree, test, kind) for kind in KINDS}
        for kind, outcomes in by_kind.items():
            counts = Counter(outcome for outcome, *_ in outcomes.values())
            seen[kind] += counts
            scalers = sum(n for *_, n in outcomes.values())
            print(f"{test.relative_to(tree)}  {kind}: {dict(counts)}, {scalers} scalers", flush=True)
        for name in sorted(set().union(*by_kind.values())):
            ends = {kind: by_kind[kind].get(name, ["missing", "", 0]) for kind in KINDS}
            if len({outcome for outcome, *_ in ends.values()}) > 1:
                different += 1
                print(f"  DIFFERENT {name}")
                for kind, (outcome, why, _) in ends.items():
                    print(f"    {kind}: {outcome} {why}")
    print(f"{different} different of", {kind: dict(counts) for kind, counts in seen.items()})
    return int(different > 0)


def run(tree: Path, test: Path, kind: str) -> Outcomes:
    """The tests of one file that name the scaler: by name how each ended, why, and how many scalers it made."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes.json")
        # Tests over several ranks start processes of their own, which this reaches.
        Path(folder, "sitecustomize.py").write_text("import pytorch_suite; pytorch_suite.put_in_place()\n")
        paths = [folder, str(Path(__file__).parent), str(test.parent), str(tree / "test")]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        ours = {"AMPWATCH_DIR": f"{folder}/runs", "AMPWATCH_STRICT": "1", KIND: kind, OUTCOMES: str(outcomes)}
        options = ["-q", "-p", "pytorch_suite", "--noconftest", "-c", os.devnull, f"--rootdir={tree}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(test)],
            cwd=test.parent,
            env=os.environ | ours | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
        if not outcomes.exists():
            raise RuntimeError(f"{test} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        read: Outcomes = json.loads(outcomes.read_text())
        return read


def put_in_place() -> None:
    """Whatever makes a scaler of torch's makes one of ours, in this process."""
    import torch
    import torch.distributed.fsdp.sharded_grad_scaler as fsdp
    from torch.testing._internal import common_distributed

    kind, plain = os.environ[KIND], torch.amp.GradScaler
    in_vain = ASKS_IN_VAIN in " ".join(sys.argv) and not torch.cuda.is_available()
    initialized = plain.__init__

    @functools.wraps(initialized)
    def initialize(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        initialized(self, "cpu" if in_vain else device, *args, **kwargs)
        made["now"] += 1
        if kind != "torch" and not isinstance(self, scaler.Watched):
            ampwatch.watch(self)

    if not torch.cuda.is_available():  # else processes are started, which find that out
        common_distributed.skip_if_lt_x_gpu = lambda x, **_: unittest.skip(f"it needs {x} GPUs")
    if in_vain:
        torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    import ampwatch
    from ampwatch import scaler

    plain.__init__ = initialize
    if kind == "ours":
        torch.GradScaler = torch.amp.GradScaler = torch.amp.grad_scaler.GradScaler = ampwatch.GradScaler
        fsdp.ShardedGradScaler = ampwatch.ShardedGradScaler


def names_of_tests(source: str) -> set[str]:
    """The functions of a file that name the scaler, or a function that does."""
    lines = source.splitlines()
    functions = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    found = {name for name, text in functions.items() if NAMED.search(text)}
    while True:
        named = re.compile(rf"\b({'|'.join(map(re.escape, found))})\b") if found else NAMED
        more = {name for name, text in functions.items() if named.search(text)} - found
        if not more:
            return found
        found |= more


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep what comes to name the scaler; the device and the parameters stand behind the name of a test."""
    names = {path: names_of_tests(path.read_text()) for path in {item.path for item in items}}
    items[:] = [
        item
        for item in items
        if any(item.name == name or item.name.startswith(f"{name}_") for name in names[item.path])
    ]


_outcomes: Outcomes = {}


def pytest_collectreport(report: Any) -> None:
    """Note a file that cannot be imported: it may be of another release than torch is."""
    if report.failed:
        _outcomes[report.nodeid] = ["not imported", str(report.longrepr).splitlines()[-1], 0]


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a test ended, and the scalers it made."""
    name = report.nodeid
    if report.when == "call" or report.outcome != "passed":
        why = str(report.longrepr).splitlines()[-1:] if report.outcome != "passed" else []
        _outcomes[name] = [report.outcome, *(why or [""]), made.pop("now", 0)]


def pytest_sessionfinish() -> None:
    """Write them down."""
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, metavar="PATH_TO_PYTORCH")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="below the tree; all that name GradScaler if none"
    )
    given = parser.parse_args()
    sys.exit(main(given.tree.resolve(), given.files))
