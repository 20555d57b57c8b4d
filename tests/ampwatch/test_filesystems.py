from __future__ import annotations

from pathlib import Path

import pytest

from ampwatch.errors import AmpwatchError
from ampwatch.filesystems import Mount, network_mount
from ampwatch_server import db
from ampwatch_server.db import Database
from ampwatch_server.settings import database_url


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("server:/home {} nfs4 rw 0 0", "nfs4"),
        ("beegfs_nodev {} beegfs rw 0 0", "beegfs"),
        ("/dev/sdb1 {} ext4 rw 0 0", None),
        ("none /elsewhere nfs rw 0 0", None),
    ],
)
def test_a_network_file_system_is_recognised(tmp_path: Path, line: str, found: str | None) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\n{line.format(tmp_path)}\n")
    expected = None if found is None else Mount(found, str(tmp_path))
    assert network_mount(tmp_path / "a" / "b", mounts) == expected


def test_where_nothing_tells_it_is_local(tmp_path: Path) -> None:
    assert network_mount(tmp_path, tmp_path / "none") is None


def test_sqlite_is_refused_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "network_mount", lambda _: Mount("nfs4", "/home"))
    with pytest.raises(AmpwatchError, match=r"lies on a network file system \(nfs4, mounted at /home\)"):
        Database(database_url(str(tmp_path / "a.db")))
