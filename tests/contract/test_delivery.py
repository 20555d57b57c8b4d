"""From the recorder to a real server and back: what one side writes, the other reads."""

import json
import time

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from ampwatch import cli, spool
from ampwatch.errors import AmpwatchError, SettingsError
from ampwatch.recorder import Harvest, Recorder
from ampwatch.records import Event
from ampwatch.settings import Settings
from ampwatch_server.serve import running


class Rows:
    def __init__(self, *harvests):
        self.harvests = list(harvests)

    def harvest(self, final):
        return self.harvests.pop(0) if self.harvests else Harvest()


def attempts(count):
    return {
        "attempt": np.arange(count),
        "stream": np.zeros(count),
        "step": np.arange(count),
        "time": 1_700_000_000.0 + np.arange(count),
        "scale": np.full(count, 2.0**16),
        "scale_after": np.full(count, 2.0**16),
        "found_inf": np.zeros(count),
        "stepped": np.ones(count),
        "skipped": np.zeros(count),
        "loss": np.where(np.arange(count) == 3, np.nan, 2.0),
    }


def record(directory, server, token):
    recorder = Recorder(
        Settings.load(server=server, token=token, dir=directory, run="r", flush_s=0.01, quiet=True)
    )
    recorder.attach(Rows(Harvest(attempts(10), None, [Event("growth", 1.0, attempt=2)])))
    recorder.event("loss_dtype", attempt=0, dtype="float32")
    recorder.finish()


@pytest.fixture
def server(tmp_path):
    with running(database=f"sqlite:///{tmp_path / 'a.db'}") as server:
        yield server


def get(server, path):
    answer = httpx.get(f"{server.url}/v1/{path}", headers={"Authorization": f"Bearer {server.token}"})
    return answer.raise_for_status().json()


def settled(server):
    """The run once it is known to be whole."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        run = get(server, "runs/r")
        if (run["status"], run["attempts"]) == ("finished", 10):
            break
        time.sleep(0.02)
    return run


def test_what_was_recorded_is_what_the_server_shows(tmp_path, server):
    record(tmp_path / "runs", server.url, server.token)
    run = settled(server)
    assert (run["status"], run["attempts"], run["taken"], run["skipped"]) == ("finished", 10, 10, 0)
    assert [(p["last_seq"], p["missing"]) for p in run["producers"]] == [
        (len(list(spool.read(tmp_path / "runs"))) - 1, [])
    ]
    events = [event["type"] for event in get(server, "runs/r/events")["items"]]
    assert sorted(events) == ["finish", "growth", "loss_dtype", "run"]


def test_with_a_wrong_token_everything_is_kept_on_disk(tmp_path, server, caplog):
    record(tmp_path / "runs", server.url, "wrong")
    assert get(server, "runs")["items"] == []
    assert [batch.kind for batch in spool.read(tmp_path / "runs")][:2] == ["events", "attempts"]
    assert [message for message in caplog.messages if "set AMPWATCH_TOKEN" in message] != []
    assert f"the records are kept in {tmp_path / 'runs'}" in caplog.text


def test_a_folder_is_synced_by_the_command_and_then_deleted(tmp_path, server, monkeypatch):
    record(tmp_path / "runs", None, None)
    monkeypatch.setenv("AMPWATCH_TOKEN", server.token)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    count = len(list(spool.read(tmp_path / "runs")))
    command = ["sync", str(tmp_path / "runs"), "--server", server.url, "--delete", "--json"]
    done = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert (done.exit_code, report["stored"], len(report["deleted"]), report["kept"]) == (0, count, 1, {})
    assert (settled(server)["attempts"], list((tmp_path / "runs").iterdir())) == (10, [])


def test_sync_without_a_server_or_into_a_place_that_cannot_be_written_says_so(tmp_path, server, monkeypatch):
    record(tmp_path / "runs", None, None)
    monkeypatch.delenv("AMPWATCH_SERVER", raising=False)
    with pytest.raises(SettingsError, match="name it with --server"):
        CliRunner().invoke(cli.app, ["sync", str(tmp_path / "runs")], catch_exceptions=False)
    monkeypatch.setenv("AMPWATCH_TOKEN", server.token)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    with pytest.raises(AmpwatchError, match=r"/proc/none.*: No such file or directory"):
        CliRunner().invoke(
            cli.app, ["sync", str(tmp_path / "runs"), "--server", server.url], catch_exceptions=False
        )
