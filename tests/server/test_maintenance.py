"""`ampwatch db`, on the database of a server that runs."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import httpx
import pytest
import sent
from typer.testing import CliRunner, Result

from ampwatch import cli
from ampwatch.cli._keep import keep_of
from ampwatch.errors import AmpwatchError
from ampwatch_server.backup import backup
from ampwatch_server.settings import Keep, database_url


def db(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["db", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def file(server, tmp_path: Path) -> Path:
    """The database of a server that runs."""
    return tmp_path / "ampwatch.db"


def test_a_copy_is_made_while_the_server_takes_batches(
    client: httpx.Client, file: Path, tmp_path: Path
) -> None:
    sent.send(client, sent.attempts(0, 5))
    assert db("backup", tmp_path / "copy.db", "--database", file).exit_code == 0
    sent.send(client, sent.attempts(5, 9, 1))
    with sqlite3.connect(tmp_path / "copy.db") as copy:
        assert copy.execute("SELECT producer, seq FROM receipts").fetchall() == [(1, 0)]
    copy.close()


def test_a_database_named_from_here_is_copied(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert db("backup", "copy.db", "--database", f"sqlite:///{file.name}").exit_code == 0
    assert (tmp_path / "copy.db").stat().st_size > 0


def test_a_copy_replaces_no_file(file: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.db").touch()
    with pytest.raises(AmpwatchError, match=r"copy\.db: it exists; name a new file"):
        db("backup", tmp_path / "copy.db", "--database", file)


def test_the_course_of_a_copy_is_not_its_output(file: Path, tmp_path: Path) -> None:
    done = db("backup", tmp_path / "copy.db", "--database", file)
    assert (done.stdout, "is copied to" in done.stderr) == ("", True)


def test_without_pg_dump_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AmpwatchError, match=r"pg_dump --format=custom --file=\S+ postgresql://u@h/d$"):
        backup(database_url("postgresql://u:secret@h/d"), tmp_path / "copy")


def test_prune_says_what_it_would_drop(client: httpx.Client, file: Path) -> None:
    sent.send(client, sent.attempts(0, 3000))
    done = db("prune", "--database", file, "--dry-run", "--json", "--attempts-days", 0)
    assert json.loads(done.stdout) == {"dropped": [], "dry_run": True}  # it was heard of just now


def test_what_is_kept_is_an_option_and_inf_keeps_it(file: Path) -> None:
    limits = ("--tensors-days", "inf", "--attempts-days", "inf", "--max-gib", "inf")
    assert "retention drops nothing" in db("prune", "--database", file, "--dry-run", *limits).stderr
    assert keep_of(None, 1.5, 0.5) == Keep(7.0, 1.5, 1 << 29)


def test_upgrade_is_said_to_be_done(file: Path) -> None:
    assert db("upgrade", "--database", file).stdout == f"ampwatch: sqlite:///{file} is up to date\n"


def test_a_name_that_is_misspelt_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(AmpwatchError, match=r"none\.db: there is no database"):
        db("upgrade", "--database", tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
