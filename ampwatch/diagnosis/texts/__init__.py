"""The catalogue of everything the diagnosis says: headlines, evidence, advice. Read by people at 3 a.m.

Headlines are one sentence: what, since which step, whether it recovers by itself. Advice is in order of
preference. Nothing here repeats the folk rules that docs/numerics.md, section 9, shows to be wrong.
"""

from __future__ import annotations

from typing import Final

from ampwatch.diagnosis.findings import Advice

from .advice_forward import FORWARD
from .advice_loop import LOOP
from .advice_scale import AFTER_UNSEEN, SCALE
from .headlines import (
    ALONE,
    APART,
    CLEANED,
    FAULTS,
    HARM,
    HEADLINES,
    HEALTHY,
    HEALTHY_UNSCALED,
    HIDDEN,
    KEPT_FINITE,
    LEFT_OVER,
    LOST,
    NO_DATA,
    NOT_CLEARED,
    NOT_JUDGED,
    ONLY_SKIPS,
    OVERFLOWN_NORM,
    RAISED,
    READ,
    RECOVERED,
    RECOVERY,
    SEEN_LATER,
    TIED,
    WHY_NONE,
)
from .short import SHORT
from .words import at, at_step, fill, first_of, module, percent, power, skipped, span, times

__all__ = [
    "ADVICE",
    "AFTER_UNSEEN",
    "ALONE",
    "APART",
    "CLEANED",
    "FAULTS",
    "HARM",
    "HEADLINES",
    "HEALTHY",
    "HEALTHY_UNSCALED",
    "HIDDEN",
    "KEPT_FINITE",
    "LEFT_OVER",
    "LOST",
    "NOT_CLEARED",
    "NOT_JUDGED",
    "NO_DATA",
    "ONLY_SKIPS",
    "OVERFLOWN_NORM",
    "RAISED",
    "READ",
    "RECOVERED",
    "RECOVERY",
    "SEEN_LATER",
    "SHORT",
    "TIED",
    "WHY_NONE",
    "at",
    "at_step",
    "fill",
    "first_of",
    "module",
    "percent",
    "power",
    "skipped",
    "span",
    "times",
]

ADVICE: Final[dict[str, list[Advice]]] = {**LOOP, **FORWARD, **SCALE}
"""By kind, or by kind and variant, as `underflow.all`."""
