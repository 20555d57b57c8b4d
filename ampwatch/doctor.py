"""What works on this machine: each part is tried, nothing is taken from its version number.

    for check in ampwatch.doctor.checks(Settings.load()):
        print(check.state, check.name, check.says)

A check fails where something that was asked for does not work; what was not asked for and is not there is a note.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from . import answers
from .filesystems import network_mount
from .room import Room
from .sender import Sender
from .settings import PREFIX, Settings

if TYPE_CHECKING:
    from .stats.proof import Proofs, Setup

State = Literal["ok", "note", "failed"]

ELEMENTS: Final = 1 << 20


class Tried(NamedTuple):
    """How the Triton kernel has done on one kind of GPU."""

    setup: Setup
    holds: bool
    says: str


class Check(NamedTuple):
    """What was tried, how it went, and what a person should know of it."""

    name: str
    state: State
    says: str


def checks(settings: Settings) -> Iterator[Check]:
    """Try everything, one after the other. Never raises; takes seconds, as it loads torch and may ask a server."""
    for name, look in _LOOKS.items():
        try:
            state, says = look(settings)
        except Exception as error:  # noqa: BLE001 - what fails in a way nobody foresaw is what a doctor is asked for
            state, says = "failed", repr(error)
        yield Check(name, state, says)


def _python(_: Settings) -> tuple[State, str]:
    return "ok", f"{platform.python_version()}, ampwatch {version('ampwatch')}, {platform.platform()}"


def _torch(_: Settings) -> tuple[State, str]:
    if not _has("torch"):
        return "note", "not installed: nothing can be trained here, and a server needs none"
    import torch

    from .internals import mismatches

    changed = mismatches(torch.amp.GradScaler)
    if changed:
        return (
            "failed",
            f"{torch.__version__}: its GradScaler is not the one known, it runs unwatched: {changed}",
        )
    return "ok", f"{torch.__version__}: its GradScaler has the methods that ampwatch relies on"


def _gpu(_: Settings) -> tuple[State, str]:
    if not _has("torch"):
        return "note", "not looked for, without torch"
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ("ok", ", ".join(names)) if names else ("note", "torch sees none")


def _reference(_: Settings) -> tuple[State, str]:
    return _tried("reference", "cpu", "plain torch, on every device")


def _cpu(_: Settings) -> tuple[State, str]:
    if not _has("torch"):
        return "note", "not tried, without torch"
    from .stats import cpu

    if not cpu.available():
        return "note", "its library was not built when ampwatch was installed: that needs a C compiler"
    return _tried("cpu", "cpu", f"compiled, with {cpu.best_instructions()} instructions")


def _triton(_: Settings) -> tuple[State, str]:
    if not _has("torch"):
        return "note", "not tried, without torch"
    from .stats import fused

    if not fused.available():
        return "note", f"it needs a GPU, and Triton {'.'.join(map(str, fused.OLDEST_TRITON))} or newer"
    import torch

    from .stats import proof, trial
    from .stats.choose import load

    found: list[Tried] = []
    for i in range(torch.cuda.device_count()):
        setup = proof.setup_of(torch.cuda.get_device_properties(i))
        if setup not in [each.setup for each in found]:
            with torch.cuda.device(i):
                found.append(
                    Tried(setup, *trial.verdict(load("triton"), "cuda", trial.by_events, trial.cases("cuda")))
                )
    return proved(found, proof.Proofs())


def proved(found: Sequence[Tried], proofs: Proofs) -> tuple[State, str]:
    """How the Triton kernel has done on each kind of GPU, for which a proof is left: `auto` goes by that."""
    says = []
    for tried in found:
        told = f"on {tried.setup.gpu} with Triton {tried.setup.triton} {tried.says}"
        try:
            proofs.add(*tried)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder can be told
            told += f". The proof cannot be kept ({error}): set XDG_CACHE_HOME, else `auto` stays with the reference"
            tried = tried._replace(holds=False)
        says.append((tried.holds, told))
    return "ok" if all(holds for holds, _ in says) else "failed", "; ".join(told for _, told in says)


def _chosen(settings: Settings) -> tuple[State, str]:
    if not _has("torch"):
        return "note", "none, without torch"
    import torch

    from .stats.choose import weigh

    device = "cuda" if torch.cuda.is_available() else "cpu"
    choice = weigh(settings.statistics, device)
    return "ok" if choice.as_asked else "failed", f"{choice.name} for training on {device}: {choice.why}"


def _recording(settings: Settings) -> tuple[State, str]:
    if not settings.enabled:
        return "note", f"off: {PREFIX}DISABLED is set, nothing is recorded"
    return "ok", "on"


def _spool(settings: Settings) -> tuple[State, str]:
    folder = settings.dir.absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return "failed", f"{folder} cannot be made: {there} is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".ampwatch-") as probe:
            probe.write(b"written by ampwatch doctor")
            probe.flush()
    except OSError as error:
        return "failed", f"{folder} cannot be written: {error.strerror}"
    bounds = settings.spool_max_bytes, settings.spool_min_free_bytes
    room = Room(folder, *bounds, usage=lambda _: shutil.disk_usage(there)).left(0)
    if room.bytes <= 0:
        return "failed", f"{folder} has no room left: {PREFIX}{room.bound.upper()} bounds it"
    mount = network_mount(there)
    where = (
        f"on a network file system ({mount.kind}, mounted at {mount.place})" if mount else "on a local disk"
    )
    return "ok", f"{folder}, {where}: {room.bytes / 1e9:.3g} GB may be written"


def _server(settings: Settings) -> tuple[State, str]:
    if not settings.server:
        return "note", f"none is set ({PREFIX}SERVER): runs stay in the folder"
    if refusal := answers.why_not(settings.server):
        return "failed", refusal
    with Sender(settings.server, settings.token) as sender:
        answer = sender.knock()
    if answer.outcome == "refused":  # as it should be: nothing was in it, and the token came first
        return "ok", f"{settings.server} is there, and takes the token"
    return "failed", answer.warning or f"{settings.server} answers as no ampwatch server does"


def _extras(_: Settings) -> tuple[State, str]:
    there = [f"{name} {version(name)}" for name in _FRAMEWORKS if _has(name)]
    server = "with" if _has("fastapi") and _has("sqlalchemy") else "without"
    return "note", f"{server} the server's packages; frameworks: {', '.join(there) or 'none'}"


_FRAMEWORKS: Final = ("accelerate", "transformers", "lightning")
_LOOKS: Final[dict[str, Callable[[Settings], tuple[State, str]]]] = {
    "python": _python,
    "torch": _torch,
    "gpu": _gpu,
    "reference pass": _reference,
    "cpu pass": _cpu,
    "triton pass": _triton,
    "chosen pass": _chosen,
    "recording": _recording,
    "folder": _spool,
    "server": _server,
    "extras": _extras,
}


def _has(package: str) -> bool:
    """Whether it is installed; importing it may take seconds."""
    try:
        return find_spec(package) is not None and bool(version(package))
    except PackageNotFoundError:
        return False


def _tried(name: str, device: str, what: str) -> tuple[State, str]:
    """Make the pass over gradients of all kinds, and compare it with the reference and with torch's own."""
    if not _has("torch"):
        return "note", "not tried, without torch"
    from .stats import trial
    from .stats.choose import load

    for case in trial.cases(device, large=ELEMENTS):
        if wrong := trial.difference(load(name), case):
            return "failed", f"{what}: {wrong}"
    return "ok", f"{what}: tried, and equal to its definition"
