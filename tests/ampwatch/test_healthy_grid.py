"""Nothing above info is said of the healthy loops of benchmarks/loops/grid.py, each trained once."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "diagnosis.py"


def test_no_false_alarm_in_any_loop_of_the_grid():
    """One process for all, as most of a short loop's time is importing torch: some 20 s for 36 trainings."""
    command = [sys.executable, str(BENCHMARK), "--healthy", "--set", "grid", "--first", "3", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    assert (told["healthy"], told["false_alarms"], told["broken"]) == (36, [], [])
