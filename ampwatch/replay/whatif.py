"""What another setting would have done to a recorded run: steps lost, the path of the scale, what underflowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Final, NamedTuple

import numpy as np

from ampwatch.errors import InvalidPolicy

from .ceiling import CASES, Case, Ceilings, ceilings
from .policies import POLICIES
from .recorded import Reals
from .recording import Recording
from .simulate import Path, simulate

POINTS: Final = 600
_GROWING: Final = frozenset({"growth_factor", "scale_factor", "incr_ratio", "factor"})
_BACKING_OFF: Final = frozenset({"backoff_factor", "decr_ratio"})
_CODE: Final = {
    "torch": "torch.amp.GradScaler({})",
    "fsdp-cpu": "ShardedGradScaler({})",
    "apex": "amp.initialize(model, optimizer, loss_scale='dynamic')  # {}",
    "keras": "keras.optimizers.LossScaleOptimizer(optimizer, {})",
    "paddle": "paddle.amp.GradScaler({})",
    "flax": "flax.training.dynamic_scale.DynamicScale({})",
    "jmp": "jmp.DynamicLossScale({})",
    "optax": "optax.apply_if_finite(optimizer, {})",
}


class Effect(NamedTuple):
    """What a policy did in one case of the ceilings.

    Arguments:
        skipped: attempts it lost.
        final_scale: after the last attempt.
        stopped: what the scaler said when it raised, else None; `stopped_at` is the attempt.
        underflow_share: mean share of float16-born elements lost, over the sampled attempts that were not skipped;
            None where no tensor is known to be float16-born.
    """

    skipped: int
    final_scale: float
    stopped: str | None
    stopped_at: int | None
    underflow_share: float | None


class WhatIf(NamedTuple):
    """A policy replayed over a recording.

    Arguments:
        policy, parameters: of the replayed scaler, all of its parameters.
        attempts: recorded attempts.
        recorded: what the recorded scale did, as `Effect`.
        hopeless: skipped attempts whose loss was not finite: no scale would have taken them.
        effects: by case of the ceilings: "worst", "likely", "best".
        paths: the path in each case; `recorded_path` that of the record.
        attempt_s: median time of an attempt, s, or None.
    """

    policy: str
    parameters: dict[str, Any]
    attempts: int
    recorded: Effect
    hopeless: int
    effects: dict[Case, Effect]
    paths: dict[Case, Path]
    recorded_scale: Reals
    attempt_number: np.ndarray[Any, Any]
    attempt_s: float | None

    @property
    def code(self) -> str:
        """The line to copy."""
        return code_of(self.policy, self.parameters)

    def as_dict(self, points: int = POINTS) -> dict[str, Any]:
        """Plain data, as `POST /v1/runs/{run}/replay` answers; paths in about so many points."""
        return {
            "policy": self.policy,
            "parameters": self.parameters,
            "code": self.code,
            "attempts": self.attempts,
            "attempt_s": self.attempt_s,
            "hopeless": self.hopeless,
            "recorded": self.recorded._asdict() | {"path": self._drawn(self.recorded_scale, points)},
            "replayed": {
                case: effect._asdict() | {"path": self._drawn(self.paths[case].scales(self.attempts), points)}
                for case, effect in self.effects.items()
            },
        }

    def _drawn(self, scale: Reals, points: int) -> dict[str, list[Any]]:
        """The lowest and highest scale in each of about so many stretches of attempts; no spike is lost."""
        if not self.attempts:
            return {"attempt": [], "low": [], "high": []}
        stride = -(-self.attempts // points)
        starts = np.arange(0, self.attempts, stride)
        return {
            "attempt": self.attempt_number[starts].tolist(),
            "low": np.minimum.reduceat(scale, starts).tolist(),
            "high": np.maximum.reduceat(scale, starts).tolist(),
        }


def checked(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a policy, as far as they are given, in their types. InvalidPolicy."""
    if name not in POLICIES:
        raise InvalidPolicy("policy", f"got {name!r}, it must be one of {', '.join(POLICIES)}")
    allowed = defaults_of(name)
    for parameter, value in parameters.items():
        if parameter not in allowed:
            raise InvalidPolicy(f"parameters.{parameter}", f"{name!r} has none, only {', '.join(allowed)}")
        _check(parameter, value, allowed[parameter])
    return {key: _typed(value, allowed[key]) for key, value in parameters.items()}


def defaults_of(name: str) -> dict[str, Any]:
    """The parameters of a policy with their defaults."""
    return {f.name: f.default for f in fields(POLICIES[name]) if f.init and f.default is not MISSING}


def what_if(
    recording: Recording,
    policy: str = "torch",
    parameters: Mapping[str, Any] | None = None,
    known: Ceilings | None = None,
) -> WhatIf:
    """Replay a policy over a recording. InvalidPolicy.

    Arguments:
        policy: a key of `policies.POLICIES`.
        parameters: of the policy; what is left out is its default.
        known: `ceilings(recording.attempts)`, where they are at hand.

    Exact for the policy; approximate for the training, which would have gone another way. The ends of the ceilings
    give the bounds "worst" and "best".
    """
    given = checked(policy, parameters or {})
    found = known or ceilings(recording.attempts)
    paths = {case: simulate(POLICIES[policy](**given), found.of(case)) for case in CASES}
    number = recording.attempts.attempt
    effects = {case: _effect(recording, path, path.scales(len(number))) for case, path in paths.items()}
    return WhatIf(
        policy,
        defaults_of(policy) | given,
        len(number),
        recorded_effect(recording),
        int(np.sum(recording.attempts.overflow & ~recording.attempts.loss_finite)),
        effects,
        paths,
        recording.attempts.scale,
        number,
        recording.attempt_s,
    )


def recorded_effect(recording: Recording) -> Effect:
    """What the recorded scale did."""
    attempts, lost = recording.attempts, np.flatnonzero(recording.attempts.overflow)
    final = float(attempts.scale_after[-1]) if attempts.n else math.nan
    return Effect(len(lost), final, None, None, _underflow(recording, attempts.scale, lost))


def code_of(policy: str, parameters: Mapping[str, Any]) -> str:
    """The line that sets a scaler up, with what differs from its defaults."""
    changed = {name: value for name, value in parameters.items() if value != defaults_of(policy).get(name)}
    given = ", ".join(f"{name}={_literal(value)}" for name, value in changed.items())
    return _CODE.get(policy, f"{policy}({{}})").format(given)


def _effect(recording: Recording, path: Path, scales: Reals) -> Effect:
    stopped_at = int(recording.attempts.attempt[path.lost[-1]]) if path.stopped and len(path.lost) else None
    share = _underflow(recording, scales, path.lost)
    return Effect(len(path.lost), path.final, path.stopped, stopped_at, share)


def _underflow(recording: Recording, scales: Reals, lost: np.ndarray[Any, Any]) -> float | None:
    losses = recording.losses
    if not len(losses.attempt):
        return None
    place = np.searchsorted(recording.attempts.attempt, losses.attempt)
    taken = ~np.isin(place, lost)
    share = losses.at(scales[np.minimum(place, len(scales) - 1)])
    return float(share[taken].mean()) if taken.any() else None


def _check(name: str, value: Any, default: Any) -> None:
    if value is None and default is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        if isinstance(default, bool) and isinstance(value, bool):
            return
        raise InvalidPolicy(f"parameters.{name}", f"got {value!r}, it must be a finite number")
    if isinstance(default, int) and not isinstance(default, bool) and (value < 1 or value != int(value)):
        raise InvalidPolicy(f"parameters.{name}", f"got {value!r}, it must be a whole number from 1 on")
    if value < 0 or (value == 0 and name.endswith(("factor", "ratio", "scale", "scaling"))):
        raise InvalidPolicy(f"parameters.{name}", f"got {value!r}, it must be above 0")
    if name in _GROWING and value <= 1:
        raise InvalidPolicy(f"parameters.{name}", f"got {value!r}, it must be above 1: the scale grows by it")
    if name in _BACKING_OFF and value >= 1:
        raise InvalidPolicy(f"parameters.{name}", f"got {value!r}, it must be below 1: the scale falls by it")


def _typed(value: Any, default: Any) -> Any:
    return int(value) if isinstance(default, int) and not isinstance(default, bool) else value


def _literal(value: Any) -> str:
    """A number as one writes it: powers of two as such."""
    if isinstance(value, float) and value > 0 and math.frexp(value)[0] == 0.5 and abs(math.log2(value)) > 6:
        return f"2.0**{int(math.log2(value))}"
    return repr(value)
