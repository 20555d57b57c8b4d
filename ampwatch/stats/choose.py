"""The one place that picks the implementation of the statistics pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ampwatch.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

AUTO: Final = "auto"
IMPLEMENTATIONS: Final = ("reference",)

_log = logging.getLogger("ampwatch")


class Statistics(NamedTuple):
    """An implementation of the statistics pass.

    `compute` is `stats.reference.statistics_of` or its equal: gradients of one device → (n, WIDTH) float64 there,
    without a synchronisation. `name` is what the run's header says.
    """

    name: str
    compute: Callable[[Sequence[Tensor]], Tensor]


def choose(name: str = AUTO) -> Statistics:
    """The implementation of the statistics pass for this process; logged at its first use.

    Arguments:
        name: one of `IMPLEMENTATIONS`, or `auto` for the fastest that works here: `Settings.statistics`, where the
            environment has been read already.
    Errors: SettingsError for a name that is none of these.
    """
    if name not in (AUTO, *IMPLEMENTATIONS):
        allowed = ", ".join((AUTO, *IMPLEMENTATIONS))
        raise SettingsError(f"statistics (AMPWATCH_STATS): got {name!r}, it must be one of {allowed}")
    return _load(IMPLEMENTATIONS[0] if name == AUTO else name)


@cache
def _load(name: str) -> Statistics:
    from .reference import statistics_of  # torch is loaded only where statistics are taken

    _log.info("statistics pass: %s", name)
    return Statistics(name, statistics_of)
