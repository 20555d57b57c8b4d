"""`ampwatch export` and `ampwatch report`, on a folder and on a server."""

import csv
import io
import json

import pytest

from ampwatch.errors import AmpwatchError, RunNotFound, SettingsError
from ampwatch_server.serve import running

from .test_cli import invoke, printed, record


def test_a_recorded_run_is_exported(tmp_path):
    record(tmp_path, "one")
    rows = list(csv.DictReader(io.StringIO(printed("export", tmp_path / "one"))))
    assert [(row["attempt"], row["scale"], row["loss"]) for row in rows[:2]] == [
        ("0", "65536.0", "NaN"),
        ("1", "32768.0", "NaN"),
    ]
    lines = printed("export", tmp_path, "--format", "ndjson", "--kind", "events").splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["run"]


def test_a_run_of_the_working_directory_goes_by_its_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "ampwatch_runs", "one")
    done = invoke("export", "one", "--format", "json", "-o", "out.json")
    assert done.exit_code == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ampwatch_runs", "out.json"]


def test_a_report_holds_all_that_it_shows(tmp_path):
    record(tmp_path, "one")
    assert invoke("report", tmp_path / "one", "-o", tmp_path / "r.html").exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Failing" in page
    assert "http-equiv" in page


def test_a_server_is_asked(tmp_path, monkeypatch):
    record(tmp_path / "runs", "one")
    here = printed("export", tmp_path / "runs")
    with running(database=str(tmp_path / "a.db"), directory=tmp_path / "runs") as server:
        monkeypatch.setenv("AMPWATCH_TOKEN", server.token)
        while (done := invoke_quietly("export", "one", "--server", server.url)) != here:
            assert isinstance(done, AmpwatchError | str)
        monkeypatch.setenv("AMPWATCH_TOKEN", "x")
        with pytest.raises(AmpwatchError, match="answered 401: this server does not know the token"):
            printed("export", "one", "--server", server.url)
    with pytest.raises(AmpwatchError, match="does not answer"):
        printed("report", "one", "--server", server.url, "-o", tmp_path / "r.html")
    with pytest.raises(SettingsError, match="whoever listens could read the token"):
        printed("report", "one", "--server", "http://10.0.0.1", "-o", tmp_path / "r.html")
    assert not list(tmp_path.glob("*r.html*"))


def invoke_quietly(*arguments):
    """What is printed, or the error where the server has not read the folder yet."""
    try:
        return printed(*arguments)
    except AmpwatchError as error:
        return error


def test_a_run_that_is_not_there_or_not_one_says_so(tmp_path):
    with pytest.raises(RunNotFound, match=r"there is no such folder.*--server asks a server"):
        printed("export", tmp_path / "none")
    record(tmp_path, "one")
    record(tmp_path, "two")
    with pytest.raises(RunNotFound, match="holds 2 runs, name one of them: one, two"):
        printed("report", tmp_path)
