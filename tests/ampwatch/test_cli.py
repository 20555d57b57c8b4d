import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import typer.main
from typer.testing import CliRunner

import ampwatch
from ampwatch import cli
from ampwatch.cli.serve import serve
from ampwatch.errors import AmpwatchError, RunNotFound, SettingsError
from ampwatch.records import Event, pack_events, pack_table
from ampwatch.spool_writer import SpoolWriter

from .spooled import PRODUCER

DOCS = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def record(directory, run, *, attempts=12, loss=float("nan")):
    """A run in the spool: every attempt skipped, the loss as given."""
    key = {"producer": PRODUCER, "run": run, "rank": 0}
    scale = [2.0 ** (16 - i) for i in range(attempts)]
    rows = {
        "attempt": range(attempts),
        "step": [0] * attempts,
        "scale": scale,
        "scale_after": [s / 2 for s in scale],
        "found_inf": [1] * attempts,
        "stepped": [1] * attempts,
        "skipped": [1] * attempts,
        "loss": [loss] * attempts,
    }
    batches = [
        pack_events([Event("run", 1_700_000_000.0, data={"name": run})], seq=0, **key),
        pack_table("attempts", rows, seq=1, **key),
    ]
    SpoolWriter(directory, run, PRODUCER, max_bytes=1 << 30).write(batches)


def until(holds):
    """Waits for what a server does by itself."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], catch_exceptions=False)


def printed(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_diagnose_prints_one_run_as_data(tmp_path):
    record(tmp_path, "one")
    answer = json.loads(printed("diagnose", tmp_path, "--json"))
    assert answer.keys() == {"run", "verdict", "findings"}
    assert (answer["run"], answer["verdict"]["word"]) == ("one", "failing")
    assert answer["findings"] == [f.as_dict() for f in ampwatch.diagnose(tmp_path)]
    assert json.loads(printed("diagnose", tmp_path / "one", "--json")) == answer


def test_diagnose_prints_several_runs_as_data(tmp_path):
    record(tmp_path, "one")
    record(tmp_path, "two")
    answer = json.loads(printed("diagnose", tmp_path, "--json"))
    assert [run["run"] for run in answer["runs"]] == ["one", "two"]
    assert {tuple(run) for run in answer["runs"]} == {("run", "verdict", "findings")}


def test_diagnose_prints_verdict_evidence_and_advice(tmp_path):
    record(tmp_path, "one")
    worst = ampwatch.diagnose(tmp_path)[0]
    said = " ".join(printed("diagnose", tmp_path).split())
    assert said.startswith(
        f"one failing {worst.severity} {worst.kind}: {worst.headline} "
    )  # the verdict's own words
    assert f"{worst.severity} {worst.kind}: " in said
    assert f"· {worst.evidence[0].text}" in said
    assert f"→ {worst.advice[0].text}" in said


def test_diagnose_says_when_the_first_records_are_gone(tmp_path):
    record(tmp_path, "r")
    gone = "The first records of this run are not in this folder any more: a server has them, or"
    assert gone not in invoke("diagnose", tmp_path).output
    (path,) = tmp_path.rglob("attempts-*.awb")
    path.rename(path.with_name("attempts-000001.awb"))
    assert gone in invoke("diagnose", tmp_path).output


def test_what_is_not_read_in_a_terminal_is_not_wrapped(tmp_path):
    record(tmp_path, "one")
    worst = ampwatch.diagnose(tmp_path)[0]
    lines = printed("diagnose", tmp_path).splitlines()
    assert f"  {worst.severity} {worst.kind}: {worst.headline}" in lines
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("command", ["diagnose", "runs"])
def test_runs_are_looked_for_where_jobs_record_them(command, tmp_path, monkeypatch):
    record(tmp_path / "ampwatch_runs", "one")
    monkeypatch.chdir(tmp_path)
    assert "one" in printed(command)


def test_runs_lists_what_a_folder_holds(tmp_path):
    record(tmp_path, "one", attempts=3, loss=2.0)
    (row,) = json.loads(printed("runs", tmp_path, "--json"))["runs"]
    assert row.pop("verdict").keys() >= {"word", "sentence"}
    assert row == {"run": "one", "started": 1_700_000_000.0, "attempts": 3, "skipped": 3, "scale": 2.0**13}
    (heading, line) = printed("runs", tmp_path).splitlines()
    assert heading.split() == ["run", "started", "(UTC)", "attempts", "skipped", "scale", "verdict"]
    assert line.split() == ["one", "2023-11-14", "22:13", "3", "3", "2^13", "healthy"]


def test_attempts_are_those_of_one_rank_and_the_scale_the_one_left_last(tmp_path):
    for rank, producer, begin in ((0, "f" * 32, 0), (0, "a" * 32, 10), (1, "b" * 32, 20)):
        rows = {
            "attempt": [0, 1],
            "time": [begin, begin + 1],
            "scale": [8.0, 8.0],
            "scale_after": [8.0, 2.0**begin],
        }
        batch = pack_table("attempts", rows, producer=producer, seq=0, run="r", rank=rank)
        SpoolWriter(tmp_path, "r", producer, max_bytes=1 << 30).write([batch])
    (row,) = json.loads(printed("runs", tmp_path, "--json"))["runs"]
    assert (row["attempts"], row["scale"]) == (4, 2.0**10)


def test_a_clock_that_showed_no_date_is_left_out(tmp_path):
    times = (float("nan"), float("inf"), 1e300, -5.0)
    events = pack_events([Event("run", time) for time in times], producer=PRODUCER, seq=0, run="r", rank=0)
    SpoolWriter(tmp_path, "r", PRODUCER, max_bytes=1 << 30).write([events])
    (_, line) = printed("runs", tmp_path).splitlines()
    assert line.split()[:3] == ["r", "0", "0"]


@pytest.mark.parametrize("command", ["diagnose", "runs"])
def test_a_folder_without_runs_is_an_error(command, tmp_path):
    with pytest.raises(RunNotFound, match="no run has been recorded there"):
        invoke(command, tmp_path)


def test_an_error_is_one_line_and_status_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ampwatch", "diagnose", str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ampwatch: {tmp_path}: no run has been recorded there\n"


def test_a_usage_error_is_plain_lines():
    done = invoke("export", "a-run", "--format", "foo")
    assert done.exit_code == 2
    usage, _, _, error = done.stderr.splitlines()
    assert usage.startswith("Usage: ")
    assert error.startswith("Error: Invalid value for '--format': ")


@pytest.mark.parametrize("command", ["diagnose", "runs", "replay", "export"])
def test_a_file_that_is_damaged_is_named_and_the_rest_judged(command, tmp_path):
    record(tmp_path, "r")
    (segment,) = tmp_path.glob("r/*/attempts-*.awb")
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    done = invoke(command, tmp_path)
    assert done.exit_code == 0
    assert done.stderr == f"ampwatch: {segment} is damaged: nothing is read from its byte 0 on\n"
    assert done.stdout


def test_a_run_of_which_nothing_can_be_read_is_not_exported(tmp_path):
    record(tmp_path, "r")
    for segment in tmp_path.glob("r/*/*.awb"):
        segment.write_bytes(b"\xff" * 99)
    with pytest.raises(RunNotFound, match="none of its records can be read"):
        invoke("export", tmp_path)


def test_the_version():
    assert printed("--version") == f"ampwatch {ampwatch.__version__}\n"


def test_serve_needs_a_folder_that_exists(tmp_path):
    with pytest.raises(RunNotFound, match="nowhere: there is no such folder"):
        invoke("serve", tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(RunNotFound, match="file: there is no such folder, it is a file"):
        invoke("serve", tmp_path / "file")


@pytest.mark.parametrize(
    ("port", "told"), [(-1, "greater than or equal to 0"), (65536, "less than or equal to 65535")]
)
def test_a_port_that_there_is_not(port, told):
    assert told in invoke("serve", "--port", port).stderr


@pytest.fixture
def served(tmp_path):
    """Starts `ampwatch serve` with these arguments in a folder of a user's own."""
    homes = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CONFIG", "CACHE", "DATA")}
    command = [sys.executable, "-u", "-m", "ampwatch", "serve", "--port", "0"]
    running = []

    def start(*arguments):
        pipes = {"cwd": tmp_path, "env": os.environ | homes, "stdout": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen([*command, *arguments], **pipes))
        return running[-1]

    yield start
    for process in running:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_serve_says_at_its_start_what_it_will_drop(capsys):
    with pytest.raises(SettingsError, match="root path"):
        serve(root_path="amp", tensors_days=math.inf, attempts_days=30.0, max_gib=math.inf)
    told = "ampwatch: retention drops rows of attempts 30 days after their run was last heard of"
    assert told in capsys.readouterr().err.splitlines()


def test_serve_shows_what_was_recorded_here_and_the_next_link_when_one_is_spent(tmp_path, served):
    record(tmp_path / "ampwatch_runs", "one")
    lines = served("--root-path", "/amp").stdout
    assert (
        next(lines) == "ampwatch: serving the runs in ampwatch_runs, and those that jobs send; Ctrl-C stops\n"
    )
    first = re.fullmatch(
        r"ampwatch: open (http://127.0.0.1:\d+/amp/link/\S+)  \(works once\)\n", next(lines)
    )[1]
    with httpx.Client(follow_redirects=True) as browser:
        runs = f"{browser.get(first).raise_for_status().url}v1/runs"
        until(lambda: [run["run"] for run in browser.get(runs).json()["items"]] == ["one"])
    following = re.fullmatch(
        r"ampwatch: that link has been opened; the next one is (\S+)  \(works once\)\n", next(lines)
    )
    assert following[1] != first
    assert httpx.get(following[1]).status_code == 303


def test_serve_answers_to_the_names_that_it_is_told(served):
    process = served("--allowed-host", "amp.example.org")
    process.stdout.readline()
    url = re.search(r"http://127.0.0.1:\d+", process.stdout.readline())[0]
    answers = [
        httpx.get(f"{url}/healthz", headers={"Host": f"{name}.example.org"}) for name in ("amp", "other")
    ]
    assert [answer.status_code for answer in answers] == [200, 421]
    assert "start it with --allowed-host other.example.org" in answers[1].json()["detail"]


def test_a_root_path_begins_with_a_slash(tmp_path):
    with pytest.raises(AmpwatchError, match="root path: got 'amp', it must begin with /"):
        invoke("serve", "--root-path", "amp", "--port", 0, "--database", tmp_path / "a.db")


def test_a_port_in_use_says_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AmpwatchError, match=rf"port {port} of 127\.0\.0\.1 is in use, .* --port 0"):
            invoke("serve", "--port", port, "--database", f"sqlite:///{tmp_path / 'a.db'}")


WITHOUT_SERVER = """
import sys
sys.modules["sqlalchemy"] = None
sys.argv = ["ampwatch", *sys.argv[1:]]
from ampwatch.cli import main
main()
"""


@pytest.mark.parametrize("command", [["serve"], ["token", "list"]])
def test_a_missing_extra_is_named(command):
    done = subprocess.run([sys.executable, "-c", WITHOUT_SERVER, *command], capture_output=True, text=True)
    expected = "needs an extra that is not installed: pip install 'ampwatch[server]'\n"
    assert (done.returncode, done.stderr) == (2, f"ampwatch: ampwatch {command[0]} {expected}")


def test_tokens_are_made_listed_and_revoked(tmp_path):
    store = ("--database", f"sqlite:///{tmp_path / 'a.db'}")
    value = printed("token", "create", "cluster", *store).strip()
    made = json.loads(
        printed("token", "create", "team", "--scope", "read", "--scope", "write", "--json", *store)
    )
    assert re.fullmatch(r"[\w-]{43}", value)
    assert (made["name"], made["scopes"]) == ("team", ["read", "write"])
    listed = json.loads(printed("token", "list", "--json", *store))["tokens"]
    assert [(t["name"], t["scopes"]) for t in listed] == [("cluster", ["write"]), ("team", ["read", "write"])]
    assert (
        printed("token", "revoke", listed[0]["id"], *store) == f"Revoked token {listed[0]['id']}, cluster.\n"
    )
    (line,) = printed("token", "list", *store).splitlines()
    assert re.fullmatch(
        rf" +{listed[1]['id']}  read,write        \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC  team", line
    )


def test_a_token_or_scope_that_there_is_not(tmp_path):
    store = ("--database", f"sqlite:///{tmp_path / 'a.db'}")
    with pytest.raises(AmpwatchError, match=r"a\.db: no server has kept its tokens there"):
        invoke("token", "list", *store)
    assert not (tmp_path / "a.db").exists()
    done = invoke("token", "create", "x", *store)
    assert done.stderr == f"ampwatch: a token for the server on {store[1]}\n"
    with pytest.raises(AmpwatchError, match="token 9: there is none with this id"):
        invoke("token", "revoke", 9, *store)
    with pytest.raises(AmpwatchError, match="scope: got 'all', it must be one of read, write, admin"):
        invoke("token", "create", "x", "--scope", "all", *store)
    with pytest.raises(AmpwatchError, match="name: got none"):
        invoke("token", "create", " ", *store)


def leaves(command, path=()):
    for name, each in command.commands.items():
        if hasattr(each, "commands"):
            yield from leaves(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


COMMANDS = dict(leaves(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_documentation_has_every_command_and_option(name):
    section = re.search(rf"## `ampwatch {name}\b.*?(?=\n## |\Z)", DOCS, re.DOTALL)
    assert section, f"docs/cli.md has no section for ampwatch {name}"
    options = [p.opts[0] for p in COMMANDS[name].params if p.param_type_name == "option" and p.name != "help"]
    assert [option for option in options if f"| `{option}` |" not in section[0]] == []
