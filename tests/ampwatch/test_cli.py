import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import ampwatch
from ampwatch import cli
from ampwatch.errors import AmpwatchError, RunNotFound
from ampwatch.records import Event, pack_events, pack_table
from ampwatch.spool import SpoolWriter

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
    assert said.startswith("one failing: ")
    assert f"{worst.severity} {worst.kind}: " in said
    assert f"· {worst.evidence[0].text}" in said
    assert f"→ {worst.advice[0].text}" in said


def test_runs_lists_what_a_folder_holds(tmp_path):
    record(tmp_path, "one", attempts=3, loss=2.0)
    (row,) = json.loads(printed("runs", tmp_path, "--json"))["runs"]
    assert row.pop("verdict").keys() >= {"word", "sentence"}
    assert row == {"run": "one", "started": 1_700_000_000.0, "attempts": 3, "skipped": 3, "scale": 2.0**13}
    (heading, line) = printed("runs", tmp_path).splitlines()
    assert heading.split() == ["run", "started", "(UTC)", "attempts", "skipped", "scale", "verdict"]
    assert line.split() == ["one", "2023-11-14", "22:13", "3", "3", "8192", "healthy"]


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


def test_the_version():
    assert printed("--version") == f"ampwatch {ampwatch.__version__}\n"


def test_serve_needs_a_folder_that_exists(tmp_path):
    with pytest.raises(RunNotFound, match="nowhere: there is no such folder"):
        invoke("serve", tmp_path / "nowhere")


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
    printed("token", "revoke", listed[0]["id"], *store)
    (line,) = printed("token", "list", *store).splitlines()
    assert re.fullmatch(
        rf" +{listed[1]['id']}  read,write        \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC  team", line
    )


def test_a_token_or_scope_that_there_is_not(tmp_path):
    store = ("--database", f"sqlite:///{tmp_path / 'a.db'}")
    with pytest.raises(AmpwatchError, match="token 9: there is none with this id"):
        invoke("token", "revoke", 9, *store)
    with pytest.raises(AmpwatchError, match="scope: got 'all', it must be one of read, write, admin"):
        invoke("token", "create", "x", "--scope", "all", *store)


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
