"""What watching costs: CPU time of whole training steps, without a monitor and with it, ours beside others.

    python benchmarks/overhead.py [--minutes 8] [--monitors ours nothing norms hooks tensorboard wandb trainscope]

Each monitor has a process of its own (overhead_job.py) and, where it is somebody else's package, a virtual environment
of its own, made here from the package registry and thrown away; it finds torch in the one that this runs in. Pairs of
blocks, without and with the monitor, are taken of one after another; ours comes every other time. It runs with default
settings and a live server, in a process of its own. What its own threads take a step is measured in the last quarter
of the time, in which it watches every step, as a training does: they flush once a second, however many steps that
holds. That is added to the ratios of the pairs. Prints the median of the ratios with / without and its 95 % interval,
distribution-free. AMPWATCH_STATS picks the statistics pass; one that fails ends the benchmark.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from served import server_process

JOB = Path(__file__).with_name("overhead_job.py")
PACKAGES = {"tensorboard": "tensorboard==2.21.0", "wandb": "wandb==0.31.0", "trainscope": "trainscope==1.8.1"}
WITHOUT_TORCH = ("trainscope",)  # it would bring one of its own
REQUIRED = """
import importlib.metadata, json, re, sys
all_of_it = importlib.metadata.requires(sys.argv[1]) or []
print(json.dumps([r for r in all_of_it if "extra ==" not in r and re.match(r"[A-Za-z0-9_-]+", r)[0] != "torch"]))
"""
MONITORS = ("ours", "nothing", "norms", "hooks", *PACKAGES)


def interpreter_for(name: str, folder: Path) -> str:
    """An interpreter that has the package of a monitor, and torch."""
    if name not in PACKAGES:
        return sys.executable
    place = folder / name
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q"]
    if name in WITHOUT_TORCH:
        subprocess.run([*pip, "--no-deps", PACKAGES[name]], check=True)
        subprocess.run([*pip, *json.loads(_output(python, REQUIRED, name))], check=True)
    else:
        subprocess.run([*pip, PACKAGES[name]], check=True)
    own = _output(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    paths = [path for path in sys.path if path.endswith("site-packages")] or [sysconfig.get_path("purelib")]
    Path(own, "torch_of_the_benchmark.pth").write_text("\n".join(paths))
    return str(python)


def _output(python: Path, code: str, *arguments: str) -> str:
    command = [str(python), "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Running:
    """A job that waits for its next pair."""

    def __init__(self, name: str, python: str, environ: dict[str, str]) -> None:
        self.name = name
        self.pairs: list[dict[str, float]] = []
        self.background_s = 0.0  # of our own threads, a step
        self._process = subprocess.Popen(
            [python, str(JOB), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )

    def take(self) -> None:
        self.pairs.append(self._measure("pair"))

    def stretch(self, seconds: float) -> None:
        self.background_s = self._measure(f"stretch {seconds}")["background"]

    def _measure(self, what: str) -> dict[str, float]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("measured "):
                return json.loads(line.removeprefix("measured "))
        raise SystemExit(f"{self.name} ended with {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        if self._process.wait():
            raise SystemExit(f"{self.name} ended with {self._process.returncode}")

    @property
    def plain_s(self) -> float:
        """CPU seconds of a step without the monitor."""
        return statistics.median(pair["plain"] for pair in self.pairs)

    def ratios(self) -> list[float]:
        later = self.background_s / self.plain_s
        return [pair["watched"] / pair["plain"] + later for pair in self.pairs]


def interval(ratios: list[float]) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median."""
    ordered, n = sorted(ratios), len(ratios)
    half = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - half))], ordered[min(n - 1, int(n / 2 + half))]


def measure(jobs: list[Running], minutes: float) -> None:
    """Pairs of each in turn; ours, where it is among them, every other time."""
    until, turn = time.monotonic() + 45 * minutes, 0
    ours = [job for job in jobs if job.name == "ours"]
    others = [job for job in jobs if job.name != "ours"]
    while time.monotonic() < until:
        for job in ours:
            job.take()
        if others:
            others[turn % len(others)].take()
        turn += 1
    for job in ours:
        job.stretch(15 * minutes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--monitors", nargs="+", choices=MONITORS, default=list(MONITORS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server_process(folder) as (url, token):
        environ = os.environ | {"AMPWATCH_SERVER": url, "AMPWATCH_TOKEN": token, "AMPWATCH_STRICT": "1"}
        interpreters = {name: interpreter_for(name, Path(folder)) for name in given.monitors}
        jobs = [Running(name, python, environ) for name, python in interpreters.items()]
        measure(jobs, given.minutes)
        for job in jobs:
            job.end()
    for job in (each for each in jobs if each.pairs):
        ratios = job.ratios()
        low, high = interval(ratios)
        print(
            f"{job.name:12} with / without: median {statistics.median(ratios):.3f} "
            f"(95 % interval {low:.3f} to {high:.3f}, {len(ratios)} pairs), {job.plain_s * 1e3:.0f} ms CPU a step "
            f"without, {job.background_s * 1e3:.2f} ms by our own threads"
        )


if __name__ == "__main__":
    main()
