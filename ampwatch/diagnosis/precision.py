"""What the dtypes say: a scaler where none is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .moments import Moment
from .static import is_off

GROWTHS: Final = 3


def useless_scaler(case: Case) -> Iterator[Finding]:
    """A scaler with bfloat16 or float32 autocast: by metadata, else by growths that never met an overflow."""
    described, stream = case.described, case.stream
    begun = stream.attempts or any(check.data.get("static") for check in described.checks.events)
    if not begun or described.born("float16") or is_off(case):
        return
    dtype = described.autocast
    if dtype == "float32" and (described.casts_by_hand or math.isfinite(stream.overflow[1])):
        return  # float16 is there all the same: the model casts by itself
    if dtype == "float32" and described.autocast_elsewhere:
        yield _elsewhere(case, described.autocast_elsewhere)
    elif dtype in ("bfloat16", "float32"):
        evidence = Evidence(text=f"Autocast ran with {dtype} in the first forward pass.", attempt=0)
        headline = texts.HEADLINES["useless_scaler"].format(dtype=dtype)
        yield _finding(case, headline, Moment(0, 0), evidence, dtype, 1.0)
    elif dtype is None and stream.path.growths_since_skip >= GROWTHS and described.born("bfloat16"):
        first = stream.path.first_growth or Moment(0, 0)
        text = f"{stream.path.growths_since_skip} growths without an overflow, up to {texts.power(stream.scale)}."
        headline = texts.HEADLINES["useless_scaler.growths"].format(
            growths=stream.path.growths_since_skip, first=texts.at(first)
        )
        yield _finding(case, headline, first, Evidence(text=text, attempt=first.attempt), "bfloat16", 0.9)


def _elsewhere(case: Case, other: str) -> Finding:
    """Autocast that was entered for another device than the one that computes."""
    device = next(iter(case.described.autocasts))
    text = f"In the first forward pass autocast was on for {other}, and off for {device}, where the model computes."
    return case.finding(
        "useless_scaler",
        "warning",
        texts.HEADLINES["useless_scaler.device"].format(device=device, other=other),
        first=Moment(0, 0),
        evidence=[Evidence(text=text, attempt=0)],
        advice=texts.fill(texts.ADVICE["useless_scaler.device"], device=device),
        confidence=1.0,
    )


def _finding(
    case: Case, headline: str, first: Moment, evidence: Evidence, dtype: str, confidence: float
) -> Finding:
    advice = texts.fill(texts.ADVICE["useless_scaler"], dtype=dtype)
    return case.finding(
        "useless_scaler",
        "warning",
        headline,
        first=first,
        evidence=[evidence],
        advice=advice,
        confidence=confidence,
    )
