"""Whether the Triton kernel has been tried on GPUs such as these: what `auto` goes by on CUDA.

`ampwatch doctor` tries it (trial.py) and leaves a proof in the user's cache folder: a small JSON file for each state of
all that the result hangs on, the `Setup`. A job reads it once, when its scaler is first used. Hundreds of ranks may read
it from a shared home at once, and write it: a file is put in place whole.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ampwatch.settings import cache_dir

SOURCES: Final = ("triton_kernel.py", "fused.py", "tables.py", "dense.py", "layout.py")
"""What the kernel is, on both sides."""

TRY_IT: Final = "run `ampwatch doctor` once on this machine"


class Setup(NamedTuple):
    """All that the result of a trial hangs on. One of another setup proves nothing."""

    gpu: str
    """Name as torch tells it."""
    capability: str
    driver: str
    """Newest CUDA version of the driver; empty where torch tells none."""
    runtime: str
    """CUDA's or ROCm's version that torch was built for."""
    torch: str
    triton: str
    kernel: str
    """Hash of `SOURCES`."""


class Proof(msgspec.Struct, frozen=True):
    """How a trial went.

    Arguments:
        holds: whether the kernel was right, and faster than what would take its place.
        says: what was compared and measured; or what was wrong.
        made_at: Unix time in seconds.
    """

    setup: Setup
    holds: bool
    says: str
    made_at: float


def setups_here() -> list[Setup]:
    """Those of the GPUs that this process sees, each kind once; none where the kernel cannot run, and none before CUDA
    is at work, which asking would start. Synchronisation: none.
    """
    import torch

    from . import fused

    if not torch.cuda.is_initialized() or not fused.available():  # type: ignore[no-untyped-call]
        return []
    found = [setup_of(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return sorted(set(found))


def setup_of(gpu: object) -> Setup:
    """That of a GPU of these properties, which are torch's: `name`, `major` and `minor`."""
    import torch
    import triton

    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    return Setup(
        gpu=getattr(gpu, "name", ""),
        capability=f"{getattr(gpu, 'major', 0)}.{getattr(gpu, 'minor', 0)}",
        driver=str(driver()) if driver is not None else "",
        runtime=str(torch.version.cuda or torch.version.hip),
        torch=torch.__version__,
        triton=triton.__version__,
        kernel=kernel_hash(),
    )


@cache
def kernel_hash() -> str:
    """Of what the kernel is made of. Errors: OSError where there are no sources."""
    here = Path(__file__).parent
    return hashlib.sha256(b"\0".join((here / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


class Proofs:
    """The proofs of a user.

    Arguments:
        folder: where they lie; by default `proofs` in the user's cache folder for ampwatch.
        setups: of the GPUs that the process sees.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        setups: Callable[[], Sequence[Setup]] = setups_here,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._setups, self._clock = folder, setups, clock

    def obstacle(self) -> str | None:
        """Why the kernel is not to be taken without being asked for; None if it may be. Reads a file for each kind of
        GPU, and starts nothing.
        """
        try:
            setups = self._setups()
            return (
                next(filter(None, map(self._obstacle, setups)), None) if setups else "no GPU is at work yet"
            )
        except Exception as error:  # noqa: BLE001 - a file, a folder, a driver: without a proof all goes on
            return f"whether the Triton kernel was tried here cannot be told ({error!r})"

    def add(self, setup: Setup, holds: bool, says: str) -> Path:
        """Leave a proof, in place of that of the same setup. Answers where it lies.

        Errors: OSError where the folder cannot be written, RuntimeError where there is no home folder.
        """
        path = self.path(setup)
        path.parent.mkdir(parents=True, exist_ok=True)
        body = msgspec.json.encode(Proof(setup, holds, says, self._clock()))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".proof-", delete=False) as file:
            file.write(body)
        os.replace(file.name, path)
        return path

    def withdraw(self, error: BaseException) -> None:
        """The kernel has failed in a training: from now on it is to be tried again first.

        A RuntimeError proves nothing against it. That is how CUDA tells of memory that ran out and, late, of faults in
        any kernel that was launched before.
        """
        error = error.__cause__ or error
        if not isinstance(error, RuntimeError):
            for setup in self._setups():
                self.add(setup, False, f"it has failed in training: {error!r}")

    def path(self, setup: Setup) -> Path:
        """Of the proof for this setup, there or not. Errors: RuntimeError where there is no home folder."""
        name = hashlib.sha256(msgspec.json.encode(setup)).hexdigest()[:16]
        return (self._folder or cache_dir() / "proofs") / f"triton-{name}.json"

    def _obstacle(self, setup: Setup) -> str | None:
        try:
            proof = msgspec.json.decode(self.path(setup).read_bytes(), type=Proof)
        except FileNotFoundError:
            return f"the Triton kernel has not been tried on this {setup.gpu}: {TRY_IT}"
        except msgspec.DecodeError as error:
            return f"the proof of the Triton kernel in {self.path(setup)} cannot be read ({error}): {TRY_IT}"
        if proof.holds:
            return None
        return f"the Triton kernel is not to be relied on with this {setup.gpu} ({proof.says}): {TRY_IT}"
