"""The one place that picks the implementation of the statistics pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ampwatch.errors import SettingsError
from ampwatch.node import local_rank
from ampwatch.notices import warn

from .proof import Proofs

if TYPE_CHECKING:
    from torch import Tensor

AUTO: Final = "auto"
REFERENCE: Final = "reference"
IMPLEMENTATIONS: Final = (REFERENCE, "cpu", "triton")

Unscale: TypeAlias = "Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]"

_log = logging.getLogger("ampwatch")


class Statistics(NamedTuple):
    """An implementation of the statistics pass.

    `name` is what the run's header says. `compute` is `stats.reference.statistics_of` or its equal: gradients of one
    device → (n, WIDTH) float64 there, without a synchronisation. `unscale(grads, found_inf, inv_scale)` answers the
    same, and besides does in place, bit for bit, what torch._amp_foreach_non_finite_check_and_unscale_ does; what it
    raises once it may have changed something is a `Touched`. None where there is no such pass. `on_fault` is told what
    either of them raised in a training, after which neither is called again there.
    """

    name: str
    compute: Callable[[Sequence[Tensor]], Tensor]
    unscale: Unscale | None = None
    on_fault: Callable[[BaseException], None] | None = None


def check(name: str) -> None:
    """SettingsError for what is neither `auto` nor one of `IMPLEMENTATIONS`."""
    if name not in (AUTO, *IMPLEMENTATIONS):
        allowed = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise SettingsError(f"statistics (AMPWATCH_STATS): got {name!r}, it must be one of {allowed}")


def choose(name: str = AUTO, device: str = "cpu", proofs: Proofs | None = None) -> Statistics:
    """The implementation of the statistics pass for a scaler; each is logged at its first use in the process.

    `auto` is the compiled pass of the device: on the CPU where it was built, on GPUs where `ampwatch doctor` has
    proved it (proof.py); else the reference. To be called when the device is at work: before that nothing is known of
    a GPU. What was asked for and cannot work, and a GPU without a proof, gives one warning and the reference.

    Arguments:
        name: `Settings.statistics`, where the environment has been read already.
        device: type of the scaler's device.
        proofs: by default those of this user.
    Errors: SettingsError for a name that is none of `IMPLEMENTATIONS`.
    """
    proofs = Proofs() if proofs is None else proofs
    choice = weigh(name, device, proofs)
    if choice.warning:
        _warn_once(choice.warning, local_rank())
    statistics = load(choice.name)
    return statistics._replace(on_fault=proofs.withdraw) if choice.name == "triton" else statistics


class Choice(NamedTuple):
    """The name of an implementation, why it is that one, and whether it is what was asked for; a warning where it is
    slower than it need be.
    """

    name: str
    why: str
    as_asked: bool = True
    warning: str = ""


def weigh(name: str = AUTO, device: str = "cpu", proofs: Proofs | None = None) -> Choice:
    """What `choose` would pick, without loading it. Arguments and errors as there."""
    check(name)
    if name != AUTO:
        obstacle = _obstacle(name, device)
        if obstacle is None:
            return Choice(name, "it was asked for")
        warning = f"statistics pass {name!r} cannot be used: {obstacle}. The reference takes its place."
        return Choice(REFERENCE, obstacle, False, warning)
    if device != "cuda":
        obstacle = _obstacle("cpu", device)
        if obstacle is None:
            return Choice("cpu", "auto takes the compiled pass, which was built")
        return Choice(REFERENCE, f"auto takes it, as {obstacle}")
    obstacle = (Proofs() if proofs is None else proofs).obstacle()
    if obstacle is None:
        return Choice("triton", "auto takes it, as `ampwatch doctor` has proved it on this GPU")
    warning = f"statistics are taken by plain torch, which is slow on a GPU: {obstacle}."
    return Choice(REFERENCE, f"auto takes it, as {obstacle}", warning=warning)


def _obstacle(name: str, device: str) -> str | None:
    """Why an implementation cannot work for a scaler of this device; None if it can."""
    if name == REFERENCE:
        return None
    from . import cpu, fused

    if name == "cpu":
        if device != "cpu":
            return f"it reads main memory, and the scaler is for {device}"
        return None if cpu.available() else "its library was not built when ampwatch was installed"
    if device != "cuda":
        return f"it runs on GPUs, and the scaler is for {device}"
    return (
        None if fused.available() else f"it needs a GPU, and Triton {'.'.join(map(str, fused.OLDEST_TRITON))}"
    )


@cache
def _warn_once(warning: str, rank: int | None) -> None:
    """By one process of a machine: it is the same for all of them."""
    if not rank:
        warn("%s", warning)


@cache
def load(name: str) -> Statistics:
    """An implementation by its name, which is logged the first time."""
    from . import cpu, fused, reference  # torch is loaded only where statistics are taken

    _log.info("statistics pass: %s", name)
    if name == REFERENCE:
        return Statistics(name, reference.statistics_of)
    kernel = cpu if name == "cpu" else fused
    return Statistics(name, kernel.statistics_of, kernel.unscale_with_statistics_)
