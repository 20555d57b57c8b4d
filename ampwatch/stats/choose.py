"""The one place that picks the implementation of the statistics pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ampwatch.errors import SettingsError
from ampwatch.notices import warn

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
    raises once it may have changed something is a `Touched`. None where there is no such pass.
    """

    name: str
    compute: Callable[[Sequence[Tensor]], Tensor]
    unscale: Unscale | None = None


def check(name: str) -> None:
    """SettingsError for what is neither `auto` nor one of `IMPLEMENTATIONS`."""
    if name not in (AUTO, *IMPLEMENTATIONS):
        allowed = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise SettingsError(f"statistics (AMPWATCH_STATS): got {name!r}, it must be one of {allowed}")


def choose(name: str = AUTO, device: str = "cpu") -> Statistics:
    """The implementation of the statistics pass for a scaler; each is logged at its first use in the process.

    `auto` is the CPU kernel for a scaler on the CPU, where it was built, else the reference: the Triton kernel has
    never run on a GPU, so it has to be asked for. One that is asked for and cannot work gives one warning and the
    reference.

    Arguments:
        name: `Settings.statistics`, where the environment has been read already.
        device: type of the scaler's device.
    Errors: SettingsError for a name that is none of `IMPLEMENTATIONS`.
    """
    choice = weigh(name, device)
    if not choice.as_asked:
        _warn_once(name, choice.why)
    return load(choice.name)


class Choice(NamedTuple):
    """The name of an implementation, why it is that one, and whether it is what was asked for."""

    name: str
    why: str
    as_asked: bool = True


def weigh(name: str = AUTO, device: str = "cpu") -> Choice:
    """What `choose` would pick, without loading it. Arguments and errors as there."""
    check(name)
    obstacle = _obstacle("cpu" if name == AUTO else name, device)
    if name != AUTO:
        return Choice(name, "it was asked for") if obstacle is None else Choice(REFERENCE, obstacle, False)
    if obstacle is None:
        return Choice("cpu", "auto takes the compiled pass, which was built")
    if device == "cuda":
        obstacle = "the Triton kernel has not run on a GPU yet, AMPWATCH_STATS=triton opts in"
    return Choice(REFERENCE, f"auto takes it, as {obstacle}")


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
def _warn_once(name: str, obstacle: str) -> None:
    warn("statistics pass %r cannot be used: %s. The reference takes its place.", name, obstacle)


@cache
def load(name: str) -> Statistics:
    """An implementation by its name, which is logged the first time."""
    from . import cpu, fused, reference  # torch is loaded only where statistics are taken

    _log.info("statistics pass: %s", name)
    if name == REFERENCE:
        return Statistics(name, reference.statistics_of)
    kernel = cpu if name == "cpu" else fused
    return Statistics(name, kernel.statistics_of, kernel.unscale_with_statistics_)
