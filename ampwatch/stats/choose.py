"""The one place that picks the implementation of the statistics pass."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ampwatch.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

AUTO: Final = "auto"
VARIABLE: Final = "AMPWATCH_STATS"
IMPLEMENTATIONS: Final = ("reference",)

_log = logging.getLogger("ampwatch")


class Statistics(NamedTuple):
    """An implementation of the statistics pass.

    `compute` is `stats.reference.statistics_of` or its equal: gradients of one device → (n, WIDTH) float64 there,
    without a synchronisation. `name` is what the run's header says.
    """

    name: str
    compute: Callable[[Sequence[Tensor]], Tensor]


def choose(name: str = AUTO, environ: Mapping[str, str] | None = None) -> Statistics:
    """The implementation of the statistics pass for this process; logged at its first use.

    Arguments:
        name: one of `IMPLEMENTATIONS`, or `auto` for the fastest that works here.
        environ: the environment, that of the process if None; `AMPWATCH_STATS` in it wins over `name`.
    Errors: SettingsError for a name that is none of these.
    """
    wanted = (os.environ if environ is None else environ).get(VARIABLE, "") or name
    if wanted not in (AUTO, *IMPLEMENTATIONS):
        raise SettingsError(
            f"statistics ({VARIABLE}): got {wanted!r}, it must be one of {', '.join((AUTO, *IMPLEMENTATIONS))}"
        )
    return _load(IMPLEMENTATIONS[0] if wanted == AUTO else wanted)


@cache
def _load(name: str) -> Statistics:
    from .reference import statistics_of  # torch is loaded only where statistics are taken

    _log.info("statistics pass: %s", name)
    return Statistics(name, statistics_of)
