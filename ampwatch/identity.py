"""Who records: the producer, the run it belongs to, its place in the world, and what it says of itself."""

from __future__ import annotations

import os
import platform
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from typing import Any, Final

import msgspec

from .guard import guard
from .records import RUN_ID
from .settings import Settings

SHARE_TIMEOUT_S: Final = 10.0
_SCHEDULER = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_shared = count()


def new_producer() -> str:
    """A random id of 128 bits for one incarnation of one process, in hexadecimal."""
    return secrets.token_hex(16)


def rank_and_world(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Rank and number of ranks: of the process group, else of `RANK` and `WORLD_SIZE`, else 0 of 1."""
    group = _process_group()
    if group is not None:
        return int(group.get_rank()), int(group.get_world_size())
    environ = os.environ if environ is None else environ
    try:
        return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def run_id(
    settings: Settings, world_size: int = 1, environ: Mapping[str, str] | None = None, *, trainings: int = 0
) -> str:
    """The run's id: the one that was set; for one process a new ULID; for several one that all of them find.

    That is the ULID which rank 0 draws and shares through the store of the process group; without a group
    torchrun's rendezvous id, then the scheduler's job. Waits up to `SHARE_TIMEOUT_S` for rank 0; ranks that
    can agree on nothing record runs of their own.

    Arguments:
        trainings: how many this process has recorded before, by which the runs of one job are told apart.
    """
    if settings.run:
        return settings.run
    if world_size == 1:
        return _ulid()
    scheduled = _scheduled(os.environ if environ is None else environ, trainings)
    return _through_store() or scheduled or _ulid()


def description(settings: Settings, world_size: int) -> dict[str, Any]:
    """The data of a `run` event, as far as it is known without the scaler (docs/format.md)."""
    return {
        "project": settings.project,
        "name": settings.name,
        "tags": list(settings.tags),
        "config": _plain(settings.config),
        "world_size": world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": "",
        "versions": _versions(),
        "statistics": "",
        "settings": settings.public(),
    }


def _ulid() -> str:
    from ulid import ULID

    return str(ULID())


def _scheduled(environ: Mapping[str, str], trainings: int) -> str | None:
    further = f"-{trainings}" if trainings else ""
    rendezvous = environ.get("TORCHELASTIC_RUN_ID", "none")
    if rendezvous != "none":  # torchrun's default, the same in every job
        return _as_run_id(rendezvous, further)
    if not environ.get("SLURM_JOB_ID"):
        return None
    return _as_run_id("-".join(environ[name] for name in _SCHEDULER if environ.get(name)), further)


def _as_run_id(text: str, further: str) -> str | None:
    cleaned = re.sub(r"[^A-Za-z0-9._:@-]", "-", text).lstrip("._:@-")[: 128 - len(further)]
    cleaned += further if cleaned else ""
    return cleaned if RUN_ID.match(cleaned) else None


def _process_group() -> Any:
    """torch.distributed with its default group initialised, or None. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _through_store() -> str | None:
    """The id that rank 0 draws; every rank must ask for its n-th run in the same order."""
    group = _process_group()
    if group is None:
        return None
    with guard("identity.share"):
        store = group.distributed_c10d._get_default_store()
        key = f"ampwatch/run/{next(_shared)}"
        if group.get_rank() == 0:
            store.set(key, _ulid())
        store.wait([key], timedelta(seconds=SHARE_TIMEOUT_S))
        return str(store.get(key).decode())
    return None


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("ampwatch", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _plain(config: Mapping[str, Any]) -> Any:
    """A user's configuration as builtins: what has no JSON form is written as its str()."""
    with guard("identity.config"):
        plain = msgspec.to_builtins(dict(config), enc_hook=str, str_keys=True)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(plain))  # fails here, not in the first batch
    return {}
