"""Servers and jobs to kill, see sites.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampwatch_server.serve import running

sys.path.insert(0, str(Path(__file__).parent))  # what the tests here share

from sites import Site, Zygote


@pytest.fixture(scope="session")
def zygote():
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def site(tmp_path, zygote):
    made = Site(tmp_path, zygote)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server in this process for the tests of a module, and the path of its database."""
    database = tmp_path_factory.mktemp("served") / "a.db"
    with running(database=f"sqlite:///{database}") as server:
        yield server, database
