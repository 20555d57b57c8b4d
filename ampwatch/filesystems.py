"""Whether a folder lies on a network file system."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

MOUNTS: Final = Path("/proc/self/mounts")
NETWORK: Final = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.beegfs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)


class Mount(NamedTuple):
    """A mounted file system: its type, and where."""

    kind: str
    place: str


def network_mount(folder: Path, mounts: Path = MOUNTS) -> Mount | None:
    """The network file system that a folder lies on; None where it is local, or nothing tells.

    Arguments:
        mounts: a table of mounts as Linux shows it.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return None
    path = folder.resolve()
    found = Mount("", "")
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = fields[1].replace("\\040", " ")
        if path.is_relative_to(place) and len(place) >= len(found.place):
            found = Mount(fields[2], place)
    return found if found.kind in NETWORK else None
