"""Numbers, steps and names as a sentence wants them."""

from __future__ import annotations

import math

from ampwatch.diagnosis.findings import Advice
from ampwatch.diagnosis.moments import Moment


def at(moment: Moment) -> str:
    """`step 120`, and the attempt beside it where they differ."""
    return at_step(moment.step, moment.attempt)


def at_step(step: int, attempt: int) -> str:
    """The same from the two numbers; a step that is not known is -1."""
    if step < 0:
        return f"attempt {attempt}"
    return f"step {step}" + ("" if step == attempt else f" (attempt {attempt})")


def span(first: Moment, last: Moment) -> str:
    """From one moment to another; attempts are counted where no step was taken between."""
    if first.attempt == last.attempt:
        return at(first)
    if first.step == last.step:
        return f"attempts {first.attempt} to {last.attempt}"
    return f"{at(first)} to {at(last)}"


def power(scale: float) -> str:
    """A loss scale for the eye: a power of two as `2^16`, anything else by four digits."""
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:.4g}"


def module(name: str) -> str:
    """A module's name for a sentence; the root module is the model, and a bare number is said to be a module."""
    if not name:
        return "the model"
    return name if any(map(str.isalpha, name)) else f"module {name}"


def first_of(name: str, count: int) -> str:
    """The name of the one, or of the `first` of several: `head.bias`, `head.bias first`."""
    return name if count == 1 else f"{name} first"


def percent(share: float) -> str:
    """A share as a percentage, with two significant digits."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def skipped(count: int) -> str:
    """`1 skipped attempt`, `3 skipped attempts`."""
    return times(count, "skipped attempt")


def times(count: int, thing: str = "attempt") -> str:
    """`1 attempt`, `3 attempts`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def fill(advice: list[Advice], **values: object) -> list[Advice]:
    """Advice with its placeholders filled in."""
    named = {key: str(value) for key, value in values.items()}
    return [Advice(_put(a.text, named), _put(a.code, named)) for a in advice]


def _put(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
