"""Parameters or buffers that became inf or NaN: no scale and no batch mends them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .episodes import Episode
from .evidence import link
from .findings import Advice, Evidence, Finding, Link
from .floor import DEAD_LOG2
from .moments import Moment

KINDS: Final = {"parameters": "weights_poisoned", "buffers": "buffers_poisoned"}


def poisoned(case: Case) -> Iterator[Finding]:
    """What finite checks found; parameters also where a step is known to have been infinite."""
    for what in KINDS:
        checks = [event for event in case.described.finite_checks.events if what in event.data]
        failed = next((event for event in checks if event.data[what].get("count")), None)
        if failed is not None and max(failed.stream, 0) == case.index:
            yield _found(case, what, failed, mended=not checks[-1].data[what].get("count"))
        elif failed is None and what == "parameters" and (first := _unchecked(case, checks)):
            yield _applied(case, first)


def _found(case: Case, what: str, check: Event, *, mended: bool) -> Finding:
    seen: dict[str, Any] = check.data[what]
    name = str((seen.get("nonfinite") or ["?"])[0])
    attempt = max(check.attempt, 0)
    checked = Moment(attempt, case.step_of(attempt))
    episode = _episode(case, attempt)
    first = episode.first_nonfinite if episode and episode.first_nonfinite else checked
    if what == "parameters" and case.stream.applied:
        first = case.stream.applied
    kind = KINDS[what]
    state = "It was mended since." if mended else texts.RECOVERY[kind].format(first=texts.at(first))
    return case.finding(
        kind,
        "fatal",
        texts.HEADLINES[kind].format(first=texts.at(first), tensor=name, recovery=state),
        first=first,
        evidence=[_count(what, seen, name, checked), *_cause(case, what, episode)],
        advice=_advice(case, kind, first),
        chain=_chain(case, kind),
        state="recovered" if mended else "open",
        module=name.rpartition(".")[0],
        tensor=name,
    )


def _unchecked(case: Case, checks: Sequence[Event]) -> Moment | None:
    """When an infinite gradient was applied, unless parameters were found finite after it."""
    first = case.stream.applied
    return None if first is None or any(check.attempt >= first.attempt for check in checks) else first


def _applied(case: Case, first: Moment) -> Finding:
    return case.finding(
        "weights_poisoned",
        "fatal",
        texts.HEADLINES[f"weights_poisoned.{'unscaled' if case.described.is_unscaled else 'applied'}"].format(
            first=texts.at(first), recovery=texts.RECOVERY["weights_poisoned"].format(first=texts.at(first))
        ),
        first=first,
        evidence=_applied_evidence(case),
        advice=_advice(case, "weights_poisoned", first),
        chain=_chain(case, "weights_poisoned"),
    )


def _in_dead_zone(case: Case, kind: str) -> bool:
    """Whether it was the loss scale that destroyed the weights: its reciprocal was infinite."""
    scaled = case.stream.applied is not None and not case.described.is_unscaled
    return kind == "weights_poisoned" and scaled and case.stream.applied_scale <= 2.0**DEAD_LOG2


def _advice(case: Case, kind: str, first: Moment) -> list[Advice]:
    key = "weights_poisoned.scale" if _in_dead_zone(case, kind) else kind
    return texts.fill(texts.ADVICE[key], first=texts.at(first))


def _chain(case: Case, kind: str) -> list[Link]:
    """Weights that the scale destroyed: when it came near that, and when it did."""
    first = case.stream.applied
    if first is None or not _in_dead_zone(case, kind):
        return []
    near = min((e.near for e in case.stream.all_episodes() if e.near and e.near <= first), default=first)
    return [link("dead_zone", near), link(kind, first)]


def _count(what: str, seen: dict[str, Any], name: str, checked: Moment) -> Evidence:
    text = f"{seen['count']} of {seen.get('checked', '?')} {what} are not finite, the first is {name}; all were at first."
    return Evidence(text=text, value=seen["count"], attempt=checked.attempt, tensor=name)


def _cause(case: Case, what: str, episode: Episode | None) -> list[Evidence]:
    """The event that poisoned them, as far as it is known."""
    if what == "parameters" and case.stream.applied:
        return _applied_evidence(case)
    if episode is None or episode.first_nonfinite is None:
        return [
            Evidence(
                text="No loss was infinite or NaN around that attempt, so it is not known when it happened."
            )
        ]
    at = episode.first_nonfinite
    if what == "buffers":
        text = f"The forward pass of {texts.at(at)} wrote them; its step was skipped, but a forward pass is not undone."
        return [Evidence(text=text, attempt=at.attempt)]
    if episode.taken_before == 0:
        return [
            Evidence(text="No step had been taken before, so it was not the optimizer within the scaler.")
        ]
    text = f"The last step taken before had finite gradients: it, or something after it, wrote them before {texts.at(at)}."
    return [Evidence(text=text, attempt=at.attempt)]


def _applied_evidence(case: Case) -> list[Evidence]:
    first, scale = case.stream.applied, case.stream.applied_scale
    assert first is not None
    if case.described.is_unscaled:
        text = f"At {texts.at(first)} gradients held inf or NaN, and the step was taken: without a scaler none is skipped."
        return [Evidence(text=text, attempt=first.attempt)]
    if scale > 2.0**DEAD_LOG2:
        text = f"At {texts.at(first)} the norm of the gradients was not finite, and the step was taken."
        return [Evidence(text=text, attempt=first.attempt)]
    text = (
        f"At {texts.at(first)} the loss scale was {texts.power(scale)}: its reciprocal is infinite in float32 from "
        "2^-128 down, the gradients were multiplied by it, and the step was taken."
    )
    return [Evidence(text=text, value=scale, attempt=first.attempt)]


def _episode(case: Case, attempt: int) -> Episode | None:
    """The newest episode with a non-finite loss that a check at this attempt looks back on."""
    known = (e for e in case.stream.all_episodes() if e.first_nonfinite and e.first.attempt <= attempt)
    newest = max(known, key=lambda e: e.first.attempt, default=None)
    return newest if newest and (newest.closed is None or attempt <= newest.closed.attempt + 1) else None
