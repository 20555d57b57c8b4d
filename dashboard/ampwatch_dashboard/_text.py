"""Numbers and names as text that is safe inside a Plotly figure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

NOWHERE: Final[Mapping[str, int]] = MappingProxyType({})  # of a run in which no process follows another
ZERO_HEIGHT: Final = -150.0  # one binade below the smallest float32
_WRITTEN_OUT_LOG2: Final = 30  # up to 2^±30 a power of two is also written out


def escape(text: object) -> str:
    """Text that Plotly shows as it stands: it reads `<…>` as markup and `&…;` as entities."""
    return html.escape(str(text), quote=False)


def shorten(name: str, limit: int = 34, head: int = 11) -> str:
    """A name cut behind its `head`, since the ends of a parameter's name tell most. Escape afterwards."""
    if len(name) <= limit:
        return name
    return f"{name[:head]}…{name[head + 1 - limit :]}"


def finite(value: Any) -> float | None:
    """A number of the API as a finite float; None for null, "NaN", "Infinity", "-Infinity" and what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def log2(value: Any) -> float | None:
    """Base-2 logarithm of a number of the API; None where it is missing, not finite or not positive."""
    number = finite(value)
    return math.log2(number) if number is not None and number > 0 else None


def scale_height(value: Any) -> float | None:
    """Height of a loss scale on a base-2 axis; that of 0, where a long run of skips ends, is `ZERO_HEIGHT`."""
    return ZERO_HEIGHT if finite(value) == 0 else log2(value)


def number_text(value: Any) -> str:
    """A number of the API to four digits, NaN and infinities by name, "–" where it is missing."""
    named = {"NaN": "NaN", "Infinity": "∞", "-Infinity": "−∞"}
    if isinstance(value, str):
        return named.get(value, "–")
    number = finite(value)
    return "–" if number is None else f"{number:,.4g}"


def scale_text(value: Any) -> str:
    """A loss scale: as a power of two where it is one, written out beside it where that is short."""
    exponent = log2(value)
    if exponent is None or not exponent.is_integer():
        return number_text(value)
    power = f"2<sup>{exponent:.0f}</sup>".replace("-", "−")
    written = f" ({value:,.10g})" if abs(exponent) <= _WRITTEN_OUT_LOG2 else ""
    return power + written


def moment_text(step: Any, attempt: Any) -> str:
    """A moment as the user counts it, with the attempt beside it where the two differ."""
    if not isinstance(step, int) or step < 0 or step == attempt:
        return f"step {attempt:,}"
    return f"step {step:,} (attempt {attempt:,})"
