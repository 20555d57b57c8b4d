"""Settings that would have served a recorded run better, each with what it would have done.

Two things are weighed: steps lost to overflow and gradient lost to underflow. A setting is proposed only where it
mends one of them by more than noise and does not cost the other, and where it does so in the likely case. Where the
loss itself is not finite no setting helps, and that is said instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from .ceiling import Ceilings, ceilings
from .policies import POLICIES
from .recording import Recording
from .whatif import Effect, WhatIf, defaults_of, recorded_effect, what_if

INTERVALS: Final = (200, 500, 1000, 2000, 5000, 10_000, 20_000)
FACTORS: Final = (2.0, 2.0**0.5, 1.2)
_STEPS: Final = 5  # fewer are not worth a change
_SHARE: Final = 0.002  # of the attempts, or of the elements
_TORCH: Final = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


class Recommendation(NamedTuple):
    """A setting, why, and what it would have done.

    Arguments:
        kind: "keep", "calibration", "probing", "underflow" or "not_the_scale".
        text: one sentence.
        code: the line to write; empty where nothing is to be written.
        parameters: of torch's scaler.
        recorded, replayed: `Effect`; the second in the likely case, and `worst` and `best` as bounds of skipped attempts.
    """

    kind: str
    text: str
    code: str
    parameters: dict[str, Any]
    recorded: Effect
    replayed: Effect | None = None
    worst: int | None = None
    best: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `GET /v1/runs/{run}/recommendations` answers."""
        replayed = self.replayed._asdict() if self.replayed else None
        return self._asdict() | {"recorded": self.recorded._asdict(), "replayed": replayed}


def recommend(recording: Recording) -> list[Recommendation]:
    """What to set, the most useful first; one entry "keep" where nothing is better. Empty without attempts."""
    if not recording.attempts.n:
        return []
    known = ceilings(recording.attempts)
    own = _own(recording)
    found = list(_found(recording, known, own))
    return found or [Recommendation("keep", _KEEP, "", own, recorded_effect(recording))]


_KEEP: Final = (
    "Keep the settings: no other would have lost noticeably fewer steps, or kept noticeably more gradient."
)


def _found(recording: Recording, known: Ceilings, own: dict[str, Any]) -> Iterator[Recommendation]:
    recorded = recorded_effect(recording)
    hopeless = int(np.sum(recording.attempts.overflow & ~recording.attempts.loss_finite))
    if hopeless > max(_STEPS, recorded.skipped // 2):
        text = (
            f"{hopeless:,} of {recorded.skipped:,} skipped attempts had a loss that is not finite: no loss scale would "
            "have taken them. See the findings for what breaks the loss."
        )
        yield Recommendation("not_the_scale", text, "", own, recorded)
    burst = _burst(recording)
    settled = own | ({"init_scale": float(recording.attempts.scale[burst])} if burst else {})
    if burst >= _STEPS:
        yield from _worth(recording, known, settled)
    yield from _best(recording, known, settled)


def _worth(recording: Recording, known: Ceilings, settled: dict[str, Any]) -> Iterator[Recommendation]:
    tried = what_if(recording, "torch", settled, known)
    if _is_worth(recorded_effect(recording), tried.effects["likely"], tried.attempts):
        yield _recommendation(recording, "calibration", tried)


def _best(recording: Recording, known: Ceilings, start: dict[str, Any]) -> Iterator[Recommendation]:
    """The start and growth that lose the fewest steps and elements, if they are worth a change."""
    tried = [
        what_if(
            recording,
            "torch",
            start | {"init_scale": init, "growth_interval": interval, "growth_factor": factor},
            known,
        )
        for init in _starts(known, start["init_scale"])
        for interval in INTERVALS
        for factor in FACTORS
    ]
    base = what_if(recording, "torch", start, known)
    best = min(tried, key=_cost)
    before, after = base.effects["likely"], best.effects["likely"]
    if _is_worth(before, after, base.attempts):
        yield _recommendation(
            recording, "underflow" if _underflow_gain(before, after) > _SHARE else "probing", best
        )


def _starts(known: Ceilings, settled: float) -> list[float]:
    """Where the scale may begin: where it did, or at the largest power of two that nine tenths of the attempts allow."""
    allowed = float(np.quantile(known.likely, 0.1, method="lower"))
    if not 0 < allowed < math.inf:
        return [settled]
    return [settled, 2.0 ** math.floor(math.log2(allowed))]


def _recommendation(recording: Recording, kind: str, tried: WhatIf) -> Recommendation:
    recorded, likely = recorded_effect(recording), tried.effects["likely"]
    return Recommendation(
        kind,
        _text(kind, tried, recorded, likely),
        tried.code,
        tried.parameters,
        recorded,
        likely,
        tried.effects["worst"].skipped,
        tried.effects["best"].skipped,
    )


def _text(kind: str, tried: WhatIf, recorded: Effect, likely: Effect) -> str:
    lost = f"{likely.skipped:,} steps would likely have been lost instead of {recorded.skipped:,}"
    begin = f"begin at 2^{np.log2(tried.parameters['init_scale']):g}"
    if kind == "calibration":
        return f"{begin.capitalize()}, the scale that the run settled on: {lost}."
    interval, factor = tried.parameters["growth_interval"], tried.parameters["growth_factor"]
    return f"Grow by {factor:.3g} every {interval:,} clean steps, and {begin}: {lost}{_shares(recorded, likely)}."


def _shares(recorded: Effect, likely: Effect) -> str:
    """What of the underflow is worth a word."""
    if likely.underflow_share is None or recorded.underflow_share is None:
        return ""
    before, after = f"{recorded.underflow_share:.2%}", f"{likely.underflow_share:.2%}"
    return "" if before == after else f", and {after} of the elements computed in float16 instead of {before}"


def _cost(tried: WhatIf) -> tuple[float, float, float]:
    """Attempts lost, each element lost counted as its share of one; the recorded growth first among equals."""
    likely = tried.effects["likely"]
    share = likely.underflow_share or 0.0
    cost = likely.skipped + share * (tried.attempts - likely.skipped)
    defaults = defaults_of("torch")
    changed = sum(tried.parameters[name] != defaults[name] for name in ("growth_interval", "growth_factor"))
    return round(cost), changed, cost


def _is_worth(before: Effect, after: Effect, attempts: int) -> bool:
    """Whether one of the two losses shrinks by more than noise, and the other does not grow by as much."""
    steps = before.skipped - after.skipped
    noise = max(_STEPS, _SHARE * attempts)
    elements = _underflow_gain(before, after)
    better = steps >= noise or elements > _SHARE
    return better and steps > -noise and elements > -_SHARE


def _underflow_gain(before: Effect, after: Effect) -> float:
    if before.underflow_share is None or after.underflow_share is None:
        return 0.0
    return before.underflow_share - after.underflow_share


def _burst(recording: Recording) -> int:
    """Attempts skipped before the first that was taken; 0 where none was."""
    return int(np.argmin(recording.attempts.overflow))


def _own(recording: Recording) -> dict[str, Any]:
    """The parameters of the recorded scaler as torch's, its first recorded scale as the initial one."""
    given = {name: recording.scaler[name] for name in _TORCH if recording.scaler.get(name) is not None}
    known = POLICIES["torch"]
    assert set(_TORCH) <= set(known.__dataclass_fields__)
    return defaults_of("torch") | given | {"init_scale": float(recording.attempts.scale[0])}
