"""One cause, one headline: which finding explains which, and in what order they are read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

import msgspec

from . import texts
from .episodes import SOON
from .findings import SEVERITIES, Evidence, Finding, Link

CAUSES: Final = (
    "rank_disagreement",
    "rank_fault",
    "sparse_overflow",
    "low_precision_params",
    "shared_parameter",
    "no_gradients",
    "backend_limit",
    "missing_scaler",
    "call_order",
    "scaler_bypassed",
    "clip_scaled",
    "grads_not_cleared",
    "cleaned_gradients",
    "norm_overflow",
    "fused_optimizer",
    "epsilon_underflow",
    "device_fault",
    "divergence",
    "weights_poisoned",
    "buffers_poisoned",
    "mask_constant",
    "loss_in_fp16",
    "forward_overflow",
    "nonfinite_forward.placed",
    "many_optimizers.stuck",
    "weights_poisoned.scale",
    "dead_zone",
    "nonfinite_forward",
    "many_optimizers",
    "scale_floor",
    "no_updates",
    "bad_batch",
    "scaler_state_lost",
    "accumulation",
    "narrow_range",
    "underflow",
    "useless_scaler",
    "schedule_ahead",
    "summed_loss",
    "unscaled_by_new_scale",
    "spike",
    "growth_probe",
    "calibration",
)
"""From the most specific to the least; with a dot what is more or less specific than others of its kind (`_cause`)."""
PRECEDENCE: Final = tuple(cause for cause in CAUSES if "." not in cause)
"""The kinds."""

_SCALE_FELL: Final = frozenset({"underflow", "narrow_range", "spike", "useless_scaler", "schedule_ahead"})
_STUCK: Final = _SCALE_FELL | {"no_updates", "calibration", "many_optimizers"}
_DYING: Final = frozenset({"weights_poisoned.scale", "dead_zone"})
"""What makes a cause urgent: the loss scale destroys the weights, or is about to."""
_FORWARD: Final = _STUCK | {"bad_batch", "nonfinite_forward", "dead_zone", "scale_floor"}
_LOCATED: Final = _FORWARD | {"mask_constant", "loss_in_fp16", "forward_overflow"}
_POISONED: Final = frozenset({"weights_poisoned", "buffers_poisoned"})
_ALL: Final = _LOCATED | _POISONED | {"divergence"}
_TOUCHED: Final = frozenset({"clip_scaled", "grads_not_cleared", "cleaned_gradients"})
_LOOP: Final = _ALL | _TOUCHED | {"call_order", "scaler_bypassed"}
EXPLAINS: Final[dict[str, frozenset[str]]] = {
    "rank_disagreement": _LOCATED
    | _POISONED
    | {"rank_fault", "divergence", "cleaned_gradients", "growth_probe"},
    "rank_fault": _LOCATED | _POISONED | {"divergence", "cleaned_gradients", "growth_probe"},
    "low_precision_params": _LOOP,
    "shared_parameter": _LOOP,
    "no_gradients": _LOOP,
    "backend_limit": _ALL | {"missing_scaler"},
    "missing_scaler": _ALL,
    "call_order": _ALL | _TOUCHED | {"scaler_bypassed"},
    "scaler_bypassed": _ALL | _TOUCHED,
    "clip_scaled": _ALL | {"cleaned_gradients"},
    "grads_not_cleared": _ALL,
    "cleaned_gradients": _ALL | {"norm_overflow"},
    "fused_optimizer": _ALL,
    "epsilon_underflow": _ALL,
    "device_fault": _LOCATED,
    "sparse_overflow": frozenset({"calibration", "growth_probe", "spike", "low_precision_params"}),
    "divergence": _LOCATED | _POISONED,
    "weights_poisoned": _LOCATED | {"buffers_poisoned"},
    "buffers_poisoned": _LOCATED,
    "weights_poisoned.scale": _LOCATED | {"buffers_poisoned"},
    "many_optimizers.stuck": _STUCK | _DYING | {"scale_floor", "growth_probe"},
    "mask_constant": _FORWARD | _DYING,
    "loss_in_fp16": _FORWARD | _DYING,
    "forward_overflow": _FORWARD | _DYING,
    "nonfinite_forward.placed": _FORWARD | _DYING,
    "dead_zone": _STUCK | {"nonfinite_forward", "scale_floor", "bad_batch"},
    "nonfinite_forward": _STUCK | {"scale_floor", "bad_batch"},
    "many_optimizers": _STUCK | {"scale_floor", "growth_probe"},
    "scale_floor": _STUCK,
    "scaler_state_lost": frozenset({"calibration", "spike", "schedule_ahead"}),
    "narrow_range": frozenset({"summed_loss"}),
    "underflow": frozenset({"summed_loss"}),
    "no_updates": _SCALE_FELL,
    "bad_batch": _SCALE_FELL,
}
"""What a cause explains from its first attempt on; metadata faults are explained whenever they began."""
_TIMELESS: Final = frozenset({"useless_scaler", "low_precision_params"})
_OF_RUN: Final = frozenset({"rank_disagreement", "rank_fault"})
"""Causes that explain what other ranks say, too."""
_LATER: Final = frozenset(
    {("weights_poisoned", "dead_zone"), ("narrow_range", "summed_loss"), ("underflow", "summed_loss")}
)
"""What came of the other, or may be seen after it, and is the headline all the same."""
_OVERLAPPING: Final = ("dead_zone", "nonfinite_forward")  # which may have begun, and recovered, before
_FINDS: Final = frozenset({"nonfinite_forward", "no_updates"})  # their advice tells how to find a cause
_DETAILED: Final = frozenset({"call_order", "scaler_bypassed", "no_gradients"})
"""Kinds that say different things of a stream."""
_SLACK: Final = {
    "grads_not_cleared": 2,
    "cleaned_gradients": 1,
    "rank_disagreement": 1,
    "rank_fault": 1,
    "call_order": 2,
    "scaler_bypassed": 2,
    "mask_constant": SOON,
    "loss_in_fp16": SOON,
    "forward_overflow": SOON,
    "nonfinite_forward": SOON,
}  # attempts in which a loop is wrong before it can be seen, or a loss breaks before it does so again and again


def settle(findings: Iterable[Finding]) -> list[Finding]:
    """Merge what is the same, let each cause take in what it explains, and sort: worst and most specific first."""
    merged = _across_ranks(_repeated(findings))
    return sorted(_causes(merged), key=_reading_order)


def _reading_order(finding: Finding) -> tuple[int, bool, int, int, int, str, int]:
    return (
        SEVERITIES.index(finding.severity),
        finding.state == "recovered",
        CAUSES.index(_cause(finding)),
        finding.first_attempt,
        finding.rank,
        finding.producer,
        finding.stream,
    )


def _repeated(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for a kind that comes again in a stream, over all its occurrences."""
    again: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        detail = finding.headline if finding.kind in _DETAILED else ""
        same = (finding.kind, finding.severity, finding.producer, finding.stream, finding.module, detail)
        again.setdefault(same, []).append(finding)
    return [_joined(same) for same in again.values()]


def _joined(same: list[Finding]) -> Finding:
    first, last = same[0], same[-1]
    if len(same) == 1:
        return first
    lasts = last.state == "open" and first.state == "recovered"  # that it recovered is not the news any more
    said, other, which = (last, first, "first") if lasts else (first, last, "the last time")
    where = texts.at_step(other.first_step, other.first_attempt)
    again = texts.RECOVERY["again"].format(times=texts.times(len(same), "time"), last=where)
    more = Evidence(text=f"Seen {len(same)} times, {which} at {where}.", attempt=other.first_attempt)
    return msgspec.structs.replace(
        said,
        headline=said.headline if lasts else _recovering(said.headline, again),
        first_attempt=first.first_attempt,
        first_step=first.first_step,
        last_attempt=last.last_attempt,
        last_step=last.last_step,
        state=last.state,
        evidence=[*said.evidence, more],
    )


def _across_ranks(findings: list[Finding]) -> list[Finding]:
    """Replicas say the same: keep the lowest rank, and name the others."""

    def same(f: Finding) -> tuple[str, int, int, str, str]:
        return (f.kind, f.stream, f.first_attempt, f.module, f.state)

    kept = []
    for _, group in groupby(sorted(findings, key=lambda f: (*same(f), f.rank, f.producer)), key=same):
        first, *others = group
        ranks = sorted({f.rank for f in others} - {first.rank})
        incarnations = [f for f in others if f.rank == first.rank]
        kept += incarnations
        kept.append(_also_on(first, ranks) if ranks else first)
    return kept


def _also_on(finding: Finding, ranks: list[int]) -> Finding:
    named = ", ".join(map(str, ranks[:16])) + (" …" if len(ranks) > 16 else "")
    return _with_evidence(finding, Evidence(text=f"The same on {len(ranks)} other ranks: {named}."))


def _causes(findings: list[Finding]) -> list[Finding]:
    """Drop what another finding of the run explains, and keep its headline with the first cause as evidence."""
    by_cause = sorted(findings, key=lambda f: (CAUSES.index(_cause(f)), f.first_attempt))
    causes: list[Finding] = []
    known: list[tuple[Finding, int]] = []  # each finding, and which cause it goes back to
    for finding in by_cause:
        cause = next((cause for before, cause in known if _explains(before, finding)), None)
        if cause is None:
            cause = len(causes)
            causes.append(finding)
        else:
            told = Evidence(text=finding.headline, attempt=finding.first_attempt, tensor=finding.tensor)
            causes[cause] = _with_evidence(causes[cause], told)
        known.append((finding, cause))
    of_cause = [[finding for finding, cause in known if cause == i] for i in range(len(causes))]
    return [_with_chain(_with_urgency(cause, of), of) for cause, of in zip(causes, of_cause, strict=True)]


def _cause(finding: Finding) -> str:
    """How specific it is: its kind, or which of the kind."""
    if finding.kind == "weights_poisoned" and any(link.kind == "dead_zone" for link in finding.chain):
        return "weights_poisoned.scale"
    if finding.kind == "nonfinite_forward" and finding.module:
        return "nonfinite_forward.placed"
    if finding.kind == "many_optimizers" and finding.severity == "error":
        return "many_optimizers.stuck"
    return finding.kind


def _with_urgency(cause: Finding, events: list[Finding]) -> Finding:
    """What a dying run calls for, in the words of the finding that knows the cause; or how to find one that nobody does."""
    if cause.kind == "dead_zone":
        finds = next((f.advice for f in events if f.kind in _FINDS), [])
        stop, *rest = cause.advice
        return msgspec.structs.replace(cause, advice=[stop, *finds, *rest])
    urgent = next((f for f in events if _cause(f) in _DYING and f.state == "open"), None)
    if urgent is None or not EXPLAINS[_cause(cause)] >= _DYING:
        return cause
    since = texts.at_step(urgent.first_step, urgent.first_attempt)
    return msgspec.structs.replace(
        cause,
        severity=urgent.severity,
        headline=_recovering(cause.headline, texts.RECOVERY[urgent.kind].format(first=since)),
        advice=[*urgent.advice[:1], *cause.advice],
        state=urgent.state,
    )


def _recovering(headline: str, how: str) -> str:
    """A headline that says that it recovered, with what is known better."""
    said, recovered, _ = headline.partition(texts.RECOVERED)
    return f"{said}{how}" if recovered else headline


def _with_chain(cause: Finding, events: list[Finding]) -> Finding:
    """The order in which a cause and what it explains began; the cause first where several began together."""
    links = [link for f in events for link in f.chain or [_link(f)]]
    first: dict[str, Link] = {}
    for link in sorted(links, key=lambda link: link.attempt):
        first.setdefault(link.kind, link)
    return msgspec.structs.replace(cause, chain=list(first.values()) if len(first) > 1 else [])


def _link(finding: Finding) -> Link:
    return Link(finding.kind, texts.SHORT[finding.kind], finding.first_attempt, finding.first_step)


def _explains(cause: Finding, other: Finding) -> bool:
    if EXPLAINS.get(_cause(cause), frozenset()).isdisjoint({other.kind, _cause(other)}):
        return False
    if cause.severity == "info" != other.severity:
        return False
    if cause.kind in _OF_RUN and cause.severity == "warning":  # ranks that train by themselves
        return False
    if cause.producer != other.producer and cause.kind not in _OF_RUN:
        return False
    pair = (cause.kind, other.kind)
    timeless = other.kind in _TIMELESS or pair in _LATER
    timeless = timeless or (pair == _OVERLAPPING and other.last_attempt >= cause.first_attempt)
    return timeless or other.first_attempt >= cause.first_attempt - _SLACK.get(cause.kind, 0)


def _with_evidence(finding: Finding, evidence: Evidence) -> Finding:
    return msgspec.structs.replace(finding, evidence=[*finding.evidence, evidence])
